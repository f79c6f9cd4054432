"""The xpu platform."""
