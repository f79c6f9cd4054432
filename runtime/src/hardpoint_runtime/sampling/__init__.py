"""Sampling: from logits to tokens, each row by its own request's parameters alone."""
