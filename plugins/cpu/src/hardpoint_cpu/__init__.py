"""The CPU platform for Hardpoint."""
