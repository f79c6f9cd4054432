"""The channel for systems without rings: ZeroMQ over a Unix socket of this host."""
