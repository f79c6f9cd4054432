"""Paged attention in plain torch, for any device: the built-in ``kv_write`` and ``attention``.

Grouped-query attention without repeating keys: the query heads that share a key head are treated as
more queries of that head. Formula: softmax(scale * q k^T + mask) v (Vaswani et al., 2017), with
``softcap * tanh(scores / softcap)`` before the mask where a cap is given (Gemma 2).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the field's habit

from hardpoint_runtime.attention import fixed, scaled
from hardpoint_runtime.attention.metadata import AttentionMetadata
from hardpoint_runtime.attention.plan import (
    AttentionPlan,
    ManyTokens,
    SingleTokens,
    Slots,
    plan_attention,
)
from hardpoint_runtime.attention.scores import alibi_bias, capped
from hardpoint_runtime.graphs.resolution import AttentionSupport
from hardpoint_runtime.graphs.support import graph_support


@graph_support(AttentionSupport.ALWAYS)
def kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
) -> None:
    """Write ``key`` and ``value`` [T, kv_heads, head] into the caches [blocks, block_size,
    kv_heads, head] at the step's slots, as the caches' type (int8: with a scale behind each head,
    :mod:`hardpoint_runtime.attention.scaled`); tokens with slot -1 are skipped.
    """
    if metadata.fixed:
        fixed.kv_write(key, value, key_cache, value_cache, metadata)
        return
    if metadata.write_rows is not None:
        key = key.index_select(0, metadata.write_rows)
        value = value.index_select(0, metadata.write_rows)
    for new, cache in ((key, key_cache), (value, value_cache)):
        flat = cache.view(-1, *cache.shape[2:])
        flat.index_copy_(0, metadata.write_slots, scaled.stored(new, cache.dtype))


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
    """Attend each token of ``query`` [T, heads, head] to its request's cache, causally.

    ``window``: how many positions a token sees, its own included. ``alibi``: the slopes [heads] of
    a bias by distance (Press et al., 2021). Returns [T, heads, head_v]; rows of padding are zero.
    Reads no slot that the batch's requests have not written, but the null block's first.
    """
    if metadata.fixed:
        return fixed.attention(
            query,
            key_cache,
            value_cache,
            metadata,
            scale=scale,
            window=window,
            softcap=softcap,
            alibi=alibi,
        )
    plan = metadata.derive(
        ("paged", window, query.dtype), lambda step: plan_attention(step, window, query.dtype)
    )
    step = _Step(query, key_cache, value_cache, scale, softcap, alibi)
    if plan.complete:
        return step.every(plan.singles[0], query)
    return _assembled(plan, step)


class _Step:
    """One layer's attention: the tensors that every group of rows needs."""

    def __init__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        softcap: float | None,
        alibi: torch.Tensor | None,
    ) -> None:
        self.query = query
        self.scale = scale
        self.softcap = softcap
        self.alibi = alibi
        self.kv_heads = key_cache.shape[2]
        # Two dimensions make a gather copy whole rows, about a third faster than three.
        self.keys = key_cache.view(-1, self.kv_heads * key_cache.shape[3])
        self.values = value_cache.view(-1, self.kv_heads * value_cache.shape[3])
        self.head_v = scaled.head_size(value_cache)

    def single(self, group: SingleTokens) -> torch.Tensor:
        """Return [B, heads, head_v] for rows with one query token each."""
        query = self.query.index_select(0, group.tokens)
        return self.every(group, query)

    def every(self, group: SingleTokens, query: torch.Tensor) -> torch.Tensor:
        """Return [B, heads, head_v] for the group's queries [B, heads, head]."""
        heads, head = query.shape[1:]
        query = query.reshape(group.rows, self.kv_heads, heads // self.kv_heads, head)
        keys = self._take(self.keys, group.slots)
        values = self._take(self.values, group.slots)
        keys = keys.view(group.rows, group.length, self.kv_heads, head).transpose(1, 2)
        values = values.view(group.rows, group.length, self.kv_heads, self.head_v).transpose(1, 2)
        out = self._attend(query, keys, values, group.mask)
        return out.reshape(group.rows, heads, self.head_v)

    def many(self, row: ManyTokens, out: torch.Tensor) -> None:
        """Write one row's outputs into ``out`` [T, heads, head_v]."""
        keys = self._take(self.keys, row.slots).view(1, -1, self.kv_heads, self.query.shape[2])
        values = self._take(self.values, row.slots).view(1, -1, self.kv_heads, self.head_v)
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        for tile in row.tiles:
            seen = slice(tile.first_key, tile.first_key + tile.keys)
            query = self.query[tile.start : tile.stop].transpose(0, 1)[None]
            result = self._attend_causally(query, keys[:, :, seen], values[:, :, seen], tile.mask)
            out[tile.start : tile.stop] = result[0].transpose(0, 1)

    def _take(self, flat: torch.Tensor, slots: Slots) -> torch.Tensor:
        rows = flat[slots] if isinstance(slots, slice) else flat.index_select(0, slots)
        return scaled.restored(rows, self.kv_heads, self.query.dtype)

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        if self.alibi is not None:
            bias = alibi_bias(self.alibi, keys.shape[2]).view(1, self.kv_heads, -1, keys.shape[2])
            mask = _sum(bias, mask, query.dtype)
        if self.softcap is not None:
            return capped(query, keys, values, mask, self.scale, self.softcap)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=self.scale)

    def _attend_causally(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        length = query.shape[2]
        if mask is None and not (self.alibi is None and self.softcap is None):
            mask = torch.full((length, length), -torch.inf, device=query.device).triu(1)
        if self.alibi is not None:
            mask = _sum(alibi_bias(self.alibi, keys.shape[2]), mask, query.dtype)
        if self.softcap is None:
            return F.scaled_dot_product_attention(
                query,
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.scale,
                enable_gqa=True,
            )
        heads, tokens, head = query.shape[1:]
        folded = query.reshape(1, self.kv_heads, heads // self.kv_heads, tokens, head)
        if self.alibi is not None and mask is not None:
            mask = mask.view(*folded.shape[:3], *mask.shape[2:])
        out = capped(folded, keys.unsqueeze(2), values.unsqueeze(2), mask, self.scale, self.softcap)
        return out.reshape(1, heads, tokens, self.head_v)


def _assembled(plan: AttentionPlan, step: _Step) -> torch.Tensor:
    tokens, heads = step.query.shape[:2]
    make = step.query.new_zeros if plan.padded else step.query.new_empty
    out = make((tokens, heads, step.head_v))
    for group in plan.singles:
        out.index_copy_(0, group.tokens, step.single(group))
    for row in plan.many:
        step.many(row, out)
    return out


def _sum(bias: torch.Tensor, mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return (bias if mask is None else bias + mask).to(dtype)
