"""The parts of the Worker suite, by feature."""
