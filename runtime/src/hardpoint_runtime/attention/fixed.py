"""Attention whose work depends on nothing but device tensors of fixed shapes: for FULL graphs.

What the host knows of a batch is frozen when a graph is captured. So every row is treated as the
longest there can be: all its blocks are gathered, whatever its length, and a mask made on the
device hides what is not its own. The work is the same for every batch of a shape and grows with
rows times the longest sequence. Shapes as in :mod:`hardpoint_runtime.attention.paged`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the field's habit
from attrs import frozen

from hardpoint_runtime.attention import scaled
from hardpoint_runtime.attention.metadata import AttentionMetadata
from hardpoint_runtime.attention.scores import alibi_bias, capped

POSITIONS = 1 << 16
"""Positions whose keys and values are gathered at once; rows beyond wait for the next turn."""


def kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
) -> None:
    """Write as the paged operation does. Tokens with slot -1 write what is there: the first entry
    of the null block, which belongs to nobody, keeps its value.
    """
    slots = metadata.slots
    nobody = (slots < 0)[:, None, None]
    slots = slots.clamp(min=0)
    for new, cache in ((key, key_cache), (value, value_cache)):
        flat = cache.view(-1, *cache.shape[2:])
        kept = flat.index_select(0, slots)
        flat.index_copy_(0, slots, torch.where(nobody, kept, scaled.stored(new, cache.dtype)))


@frozen(kw_only=True, eq=False)
class FixedRows:
    """Some rows of a batch, R of them, with Q query places each and L positions.

    ``tokens`` [R * Q]: the token at each place, any token where a row has fewer. ``slots`` [R * L]:
    rows of the flat cache; positions past a row's end repeat its first. ``mask`` [R, 1, Q, L]: 0
    or -inf.
    """

    rows: int
    tokens: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor


@frozen(kw_only=True, eq=False)
class FixedPlan:
    """All rows in turns; ``places`` [T] is where each token's output is among R * Q of all rows,
    ``real`` [T, 1, 1] whether it has any.
    """

    turns: tuple[FixedRows, ...]
    places: torch.Tensor
    real: torch.Tensor


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
    """Attend as the paged operation does, to :attr:`AttentionMetadata.max_query` tokens a row at
    most.
    """
    plan = metadata.derive(
        ("fixed", window, query.dtype), lambda step: _plan(step, window, query.dtype)
    )
    keys = key_cache.view(-1, key_cache.shape[2] * key_cache.shape[3])
    values = value_cache.view(-1, value_cache.shape[2] * value_cache.shape[3])
    heads, kv_heads, head_v = query.shape[1], key_cache.shape[2], scaled.head_size(value_cache)
    outs = []
    for turn in plan.turns:
        asked = query.index_select(0, turn.tokens)
        asked = asked.view(turn.rows, -1, heads, query.shape[2]).transpose(1, 2)
        key, value = (
            scaled.restored(flat.index_select(0, turn.slots), kv_heads, query.dtype)
            .view(turn.rows, -1, kv_heads, size)
            .transpose(1, 2)
            for flat, size in ((keys, query.shape[2]), (values, head_v))
        )
        mask = turn.mask
        if alibi is not None:
            mask = (mask + alibi_bias(alibi, mask.shape[-1])).to(mask.dtype)
        out = _attend(asked, key, value, mask, scale, softcap)
        outs.append(out.transpose(1, 2).reshape(-1, heads, head_v))
    every = outs[0] if len(outs) == 1 else torch.cat(outs)
    return torch.where(plan.real, every.index_select(0, plan.places), 0)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Return [R, heads, Q, head_v] of [R, heads, Q, head] and [R, kv_heads, L, head]."""
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )
    rows, heads, places, head = query.shape
    kv_heads = keys.shape[1]
    folded = query.reshape(rows, kv_heads, heads // kv_heads, places, head)
    mask = mask.expand(rows, heads, *mask.shape[2:]).reshape(*folded.shape[:3], *mask.shape[2:])
    out = capped(folded, keys.unsqueeze(2), values.unsqueeze(2), mask, scale, softcap)
    return out.reshape(rows, heads, places, values.shape[3])


def _plan(metadata: AttentionMetadata, window: int | None, dtype: torch.dtype) -> FixedPlan:
    starts, ends = metadata.query_start_device[:-1].long(), metadata.query_start_device[1:].long()
    rows, columns = metadata.block_table.shape
    step = max(1, POSITIONS // max(1, columns * metadata.block_size))
    turns = tuple(
        _rows(metadata, slice(row, min(row + step, rows)), window, dtype)
        for row in range(0, rows, step)
    )
    tokens = torch.arange(metadata.padded_tokens, device=starts.device)
    row = (ends <= tokens[:, None]).sum(1).clamp(max=rows - 1)
    place = (tokens - starts.index_select(0, row)).clamp(min=0, max=metadata.max_query - 1)
    return FixedPlan(
        turns=turns,
        places=row * metadata.max_query + place,
        real=(tokens < ends[-1])[:, None, None],
    )


def _rows(
    metadata: AttentionMetadata, rows: slice, window: int | None, dtype: torch.dtype
) -> FixedRows:
    table = metadata.block_table[rows].long()
    device = table.device
    starts = metadata.query_start_device[:-1][rows, None].long()
    counts = metadata.query_start_device[1:][rows, None].long() - starts
    lengths = metadata.seq_lens_device[rows, None].long()
    offsets = torch.arange(metadata.block_size, device=device)
    slots = (table[:, :, None] * metadata.block_size + offsets).flatten(1)
    steps = torch.arange(slots.shape[1], device=device)
    slots = torch.where(steps < lengths, slots, slots[:, :1])
    places = torch.arange(metadata.max_query, device=device)
    position = (lengths - counts + places)[:, :, None]
    seen = (steps <= position) & (steps < lengths[:, :, None])
    if window is not None:
        seen = seen & (steps > position - window)
    # A place without a token sees the first position, so that nowhere nothing is seen.
    seen = seen | ((places >= counts)[:, :, None] & (steps == 0))
    mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, -torch.inf)
    tokens = (starts + places).clamp(max=metadata.padded_tokens - 1)
    return FixedRows(
        rows=table.shape[0],
        tokens=tokens.flatten(),
        slots=slots.flatten(),
        mask=mask[:, None],
    )
