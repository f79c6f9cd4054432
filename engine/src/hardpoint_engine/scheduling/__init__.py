"""Which requests run in a step, and which KV blocks they have."""
