"""The cuda platform."""
