"""The channel of one host: rings in memory without a name, and bells for who sleeps."""
