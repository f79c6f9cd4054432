"""The command `hardpoint generate`."""
