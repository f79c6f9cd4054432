"""Answers of a given form: a JSON schema, a regular expression, a choice, a grammar.

The driver alone knows grammars. It compiles them beside the steps, says before each choice of a
token which ones may come (workers get a bit for each), and takes in the token that came.
"""
