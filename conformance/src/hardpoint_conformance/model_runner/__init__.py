"""The parts of the ModelRunner suite, by what they ask."""
