"""How much work space the programs will need, before they can be compiled.

The KV cache's size is part of every program's shape, and is itself what memory is left. So the work
space is estimated, generously, from the largest shapes; after the warm-up the worker compares it
with XLA's own account.
"""

from __future__ import annotations

from hardpoint_tpu.attention import CHUNK
from hardpoint_tpu.buckets import Buckets, Shape
from hardpoint_tpu.shape import ModelShape

RESERVE = 32 << 20
"""Bytes for programs, their constants and inputs."""
LOGIT_COPIES = 8
"""Arrays of the logits' size alive at once while a token is drawn: random numbers mostly."""


def temporary_bytes(model: ModelShape, buckets: Buckets, block_size: int) -> int:
    """Return bytes of work space on all devices together."""
    backbone = max(_backbone(model, shape, block_size) for shape in buckets.shapes)
    logits = buckets.rows[-1] * model.vocabulary * 4 * LOGIT_COPIES
    return (max(backbone, logits) + RESERVE) * model.devices


def _backbone(model: ModelShape, shape: Shape, block_size: int) -> int:
    """Return bytes of one device's work space for one layer, all in float32."""
    layout = model.layout
    heads = layout.query_heads + 2 * layout.kv_heads
    token = 4 * model.hidden + 2 * heads * model.head + 3 * (model.inner // model.devices + 1)
    chunk = max(CHUNK, block_size)
    gathered = 4 * shape.tiles * chunk * layout.kv_heads * model.head
    scores = 3 * shape.tokens * layout.query_heads * chunk
    running = 4 * shape.tokens * layout.query_heads * (model.head + 2)
    return 4 * (shape.tokens * token + gathered + scores + running)
