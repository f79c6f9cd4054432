"""Attention over the paged KV cache: the step's metadata, its builder, and the plain torch way."""
