"""The parts of the Platform suite, by what they ask."""
