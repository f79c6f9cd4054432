"""The operation ``attention`` over the paged cache: rows with one token by one kernel, rows with
several by another, whatever the mixture.
"""

from __future__ import annotations

import itertools

import torch

from hardpoint_runtime.attention.metadata import AttentionMetadata
from hardpoint_runtime.graphs.resolution import AttentionSupport
from hardpoint_runtime.graphs.support import graph_support
from hardpoint_runtime.kernels.launches import rows_of
from hardpoint_runtime.kernels.paged_decode import paged_decode
from hardpoint_runtime.kernels.paged_prefill import paged_prefill
from hardpoint_runtime.kernels.tiles import Operands

EVERYTHING = (1 << 31) - 1
"""The window of a model without one."""


@graph_support(AttentionSupport.ALWAYS)
def attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    alibi: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend as :func:`hardpoint_runtime.attention.paged.attention` does. In FULL graphs only
    device tensors decide, and both kernels are launched where a row may have several tokens.
    """
    fixed = metadata.fixed
    shape = (*query.shape[:2], value_cache.shape[3])
    # Padding is nobody's: no kernel writes it.
    padded = fixed or metadata.num_tokens < metadata.padded_tokens
    out = query.new_zeros(shape) if padded else query.new_empty(shape)
    queries = {1, metadata.max_query} if fixed else metadata.derive("queries of rows", _queries)
    operands = Operands(
        query=rows_of(query),
        key_cache=key_cache,
        value_cache=value_cache,
        table=metadata.block_table,
        query_start=metadata.query_start_device,
        seq_lens=metadata.seq_lens_device,
        slopes=alibi,
        out=out,
        scale=scale,
        softcap=softcap,
        window=EVERYTHING if window is None else window,
    )
    if 1 in queries:
        paged_decode(operands, metadata.max_seq)
    if max(queries, default=0) > 1:
        paged_prefill(operands, metadata.max_query)
    return out


def _queries(metadata: AttentionMetadata) -> set[int]:
    """Return how many tokens rows have."""
    return {stop - start for start, stop in itertools.pairwise(metadata.query_start)}
