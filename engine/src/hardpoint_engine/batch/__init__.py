"""A file of prompts answered into a file of results, again and again until all are there."""
