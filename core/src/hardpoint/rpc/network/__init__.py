"""The channel to workers on other hosts: ZeroMQ over TCP, encrypted, closed to strangers."""
