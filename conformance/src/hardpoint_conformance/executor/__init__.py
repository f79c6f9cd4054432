"""The parts of the Executor suite, by what they ask."""
