"""The rocm platform."""
