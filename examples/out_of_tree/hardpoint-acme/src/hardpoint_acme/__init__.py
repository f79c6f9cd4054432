"""The platform ``acme``: a simulated accelerator, by a third party."""
