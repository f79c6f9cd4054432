"""Memory that outlives a step: the KV cache."""
