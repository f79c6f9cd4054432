"""A worker's weights as safetensors files in parts."""

from __future__ import annotations


def write_sharded_state(model, context, path, pattern, max_size):
    raise NotImplementedError
