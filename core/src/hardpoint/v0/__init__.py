"""The older API's messages (v0), for drivers that speak it, and their conversion."""
