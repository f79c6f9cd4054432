"""Engines that serve a model on the host's processors, one a file, each with a class ``Engine``
that ``serving_turns.py`` drives.

All do the same work: they get prompts as token ids, and generate so many tokens after each,
greedily, whatever these are. A file here is run by path, in whatever interpreter has its library;
of Hardpoint only ``ours.py`` imports anything.
"""
