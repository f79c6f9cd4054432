"""Recorded graphs: which are made, which one a step replays, and what was saved by it."""
