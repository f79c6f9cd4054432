"""The ``dummy`` platform: complete, deterministic, without hardware or array library.

The platform to copy when bringing up hardware, and the one that core and engine are tested on.
"""
