"""Paged attention against dense attention, over random lengths and block sizes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hardpoint_runtime.attention import fixed
from hardpoint_runtime.attention.builder import AttentionMetadataBuilder
from hardpoint_runtime.attention.paged import attention, kv_write
from hardpoint_runtime.attention.plan import TILE, plan_attention
from hardpoint_runtime.device import HostDeviceOps
from hardpoint_runtime.graphs.recorded import GraphPool, record_graph
from hardpoint_runtime.graphs.static_buffers import StaticBuffers

HEADS, KV_HEADS, HEAD = 6, 2, 16
SLOPES = torch.tensor([2.0 ** -(1 + head) for head in range(HEADS)])
DEVICE = HostDeviceOps()


class Batch:
    """Requests with all their keys and values, in a cache full of NaN apart from them."""

    def __init__(
        self, seed, lengths, block_size, *, dtype=torch.float32, head_v=HEAD, cache_dtype=None
    ):
        self.generator = torch.Generator().manual_seed(seed)
        self.block_size = block_size
        self.dtype = dtype
        self.lengths = list(lengths)
        needed = [-(-length // block_size) for length, _ in self.lengths]
        ids = list(range(1, sum(needed) + 4))
        random.Random(seed).shuffle(ids)
        self.blocks = [[ids.pop() for _ in range(count)] for count in needed]
        self.keys = [self._random(length, KV_HEADS, HEAD) for length, _ in self.lengths]
        self.values = [self._random(length, KV_HEADS, head_v) for length, _ in self.lengths]
        self.queries = [self._random(queries, HEADS, HEAD) for _, queries in self.lengths]
        shape = (sum(needed) + 4, block_size, KV_HEADS)
        self.key_cache = torch.full((*shape, HEAD), torch.nan, dtype=cache_dtype or dtype)
        self.value_cache = torch.full((*shape, head_v), torch.nan, dtype=cache_dtype or dtype)
        for row, (length, queries) in enumerate(self.lengths):
            self._put(row, 0, length - queries)

    def _random(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def _put(self, row, first, last):
        for position in range(first, last):
            block, offset = (
                self.blocks[row][position // self.block_size],
                position % self.block_size,
            )
            self.key_cache[block, offset] = self.keys[row][position]
            self.value_cache[block, offset] = self.values[row][position]

    def metadata(self, order, pad_rows=0, pad_tokens=0, fixed=None):
        starts, slots, positions = [0], [], []
        for row in order:
            length, queries = self.lengths[row]
            starts.append(starts[-1] + queries)
            positions += range(length - queries, length)
            slots += [
                self.blocks[row][p // self.block_size] * self.block_size + p % self.block_size
                for p in range(length - queries, length)
            ]
        builder = AttentionMetadataBuilder(DEVICE, self.block_size)
        values = {
            "query_start": starts + [starts[-1]] * pad_rows,
            "seq_lens": [self.lengths[row][0] for row in order] + [0] * pad_rows,
            "block_table": [self.blocks[row] for row in order] + [[]] * pad_rows,
            "slots": slots + [-1] * pad_tokens,
            "positions": positions + [0] * pad_tokens,
            "num_reqs": len(order),
            "num_tokens": starts[-1],
        }
        if fixed is None:
            return builder.build(**values)
        longest, max_query = fixed
        buffers = StaticBuffers(
            DEVICE,
            tokens=len(slots) + pad_tokens,
            rows=len(order) + pad_rows,
            columns=[-(-longest // self.block_size)],
        )
        return builder.build_for_graph(buffers.whole.groups[0], max_query=max_query, **values)

    def run(self, order=None, *, pad_rows=0, pad_tokens=0, fixed=None, **options):
        """Write this step's keys and values, attend; return one output a row, and the padding's."""
        order = list(range(len(self.lengths))) if order is None else order
        metadata = self.metadata(order, pad_rows, pad_tokens, fixed)

        def tokens(parts, fill):
            new = [part[-self.lengths[row][1] :] for row, part in ((r, parts[r]) for r in order)]
            padding = torch.full((pad_tokens, *parts[0].shape[1:]), fill, dtype=self.dtype)
            return torch.cat([*new, padding])

        with torch.inference_mode():
            kv_write(
                tokens(self.keys, torch.nan),
                tokens(self.values, torch.nan),
                self.key_cache,
                self.value_cache,
                metadata,
            )
            out = attention(
                tokens(self.queries, torch.nan),
                self.key_cache,
                self.value_cache,
                metadata,
                scale=HEAD**-0.5,
                **options,
            )
        cuts = [self.lengths[row][1] for row in order]
        *rows, padding = out.split([*cuts, pad_tokens])
        return dict(zip(order, rows, strict=True)), padding

    def dense(self, row, *, window=None, softcap=None, alibi=None):
        """Attention of one row by the formula, in float64."""
        length, queries = self.lengths[row]
        share = HEADS // KV_HEADS
        key = self.keys[row].double().repeat_interleave(share, 1)
        value = self.values[row].double().repeat_interleave(share, 1)
        scores = torch.einsum("qhd,khd->hqk", self.queries[row].double(), key) * HEAD**-0.5
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        at = torch.arange(length - queries, length)[:, None]
        if alibi is not None:
            scores = scores + alibi.double()[:, None, None] * (torch.arange(length) - at)
        seen = torch.arange(length)[None] <= at
        if window is not None:
            seen &= torch.arange(length)[None] > at - window
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value)


def random_lengths(seed, rows=7, longest=150):
    """(tokens in all, of which queries): decodes, whole prompts and later chunks."""
    source = random.Random(seed)
    lengths = []
    for _ in range(rows):
        length = source.randint(1, longest)
        queries = source.choice([1, 1, length, source.randint(1, length)])
        lengths.append((length, queries))
    return lengths


def largest_error(batch, outputs, **options):
    errors = [
        (out.double() - batch.dense(row, **options)).abs().max() for row, out in outputs.items()
    ]
    return torch.stack(errors).max().item()  # NaN if any is


@pytest.mark.parametrize("block_size", [1, 16, 32, 128])
@pytest.mark.parametrize("seed", range(4))
def test_attention_equals_the_formula(block_size, seed):
    batch = Batch(seed, random_lengths(seed), block_size)
    outputs, _ = batch.run()
    assert largest_error(batch, outputs) < 1e-5


@pytest.mark.parametrize("block_size", [1, 16, 32, 128])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 37},
        {"window": 4096},
        {"softcap": 3.0},
        {"window": 20, "softcap": 2.0},
        {"alibi": SLOPES},
        {"alibi": SLOPES, "window": 20, "softcap": 2.0},
    ],
    ids="-".join,
)
def test_window_soft_cap_and_slopes_equal_the_formula(block_size, options):
    batch = Batch(11, random_lengths(11), block_size)
    outputs, _ = batch.run(**options)
    assert largest_error(batch, outputs, **options) < 1e-5


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 300}, {"softcap": 4.0}, {"alibi": SLOPES}],
    ids="-".join,
)
def test_chunks_longer_than_a_tile_equal_the_formula(options):
    lengths = [(2 * TILE + 90, 2 * TILE + 30), (TILE + 5, TILE + 5), (700, 1)]
    batch = Batch(5, lengths, 32)
    outputs, _ = batch.run(**options)
    assert largest_error(batch, outputs, **options) < 1e-5


def test_values_may_have_another_size_than_keys():
    batch = Batch(3, random_lengths(3), 16, head_v=24)
    outputs, _ = batch.run(softcap=50.0)
    assert largest_error(batch, outputs, softcap=50.0) < 1e-5


def test_bfloat16_stays_near_the_formula():
    batch = Batch(2, random_lengths(2), 16, dtype=torch.bfloat16)
    for options in ({}, {"softcap": 5.0}):
        outputs, _ = batch.run(**options)
        assert largest_error(batch, outputs, **options) < 2e-2


@pytest.mark.parametrize("fixed", [None, (160, 150)])
def test_a_cache_of_another_type_holds_keys_and_values_rounded_to_it(fixed):
    outputs, _ = Batch(4, random_lengths(4), 16, cache_dtype=torch.bfloat16).run(fixed=fixed)
    rounded = Batch(4, random_lengths(4), 16)
    for parts in (rounded.keys, rounded.values):
        parts[:] = [part.bfloat16().float() for part in parts]
    for row, (length, queries) in enumerate(rounded.lengths):
        rounded._put(row, 0, length - queries)
    expected, _ = rounded.run(fixed=fixed)
    for row, out in expected.items():
        torch.testing.assert_close(outputs[row], out, atol=1e-6, rtol=0)


def test_order_in_the_batch_does_not_change_outputs():
    batch = Batch(21, random_lengths(21, rows=9), 16)
    first, _ = batch.run()
    order = [4, 8, 0, 6, 2, 7, 1, 5, 3]
    second, _ = batch.run(order)
    for row, out in first.items():
        torch.testing.assert_close(second[row], out, atol=1e-6, rtol=0)


def test_padding_is_inert():
    batch = Batch(8, random_lengths(8), 16)
    plain, _ = batch.run()
    padded, padding = batch.run(pad_rows=3, pad_tokens=5)
    for row, out in plain.items():
        torch.testing.assert_close(padded[row], out, atol=1e-6, rtol=0)
    assert (padding == 0).all()
    assert torch.isnan(batch.key_cache[0]).all(), "padding was written into the null block"


def test_padding_of_single_tokens_is_inert():
    batch = Batch(9, [(40, 1), (3, 1), (17, 1)], 16)
    plain, _ = batch.run()
    padded, padding = batch.run(pad_rows=1, pad_tokens=1)
    for row, out in plain.items():
        torch.testing.assert_close(padded[row], out, atol=1e-6, rtol=0)
    assert (padding == 0).all()


def test_unwritten_cache_never_leaks():
    """Everything but the requests' own tokens is NaN, inside their last blocks too."""
    batch = Batch(14, [(130, 1), (1, 1), (2, 2), (90, 33), (1000, 1)], 128)
    for options in ({}, {"window": 5}, {"softcap": 2.0}):
        outputs, _ = batch.run(**options)
        assert all(torch.isfinite(out).all() for out in outputs.values())
    assert torch.isnan(batch.key_cache).any()


def test_rows_of_very_different_length_are_grouped():
    """One long request must not make its neighbours read its length in padding."""
    lengths = [(8000, 1)] + [(10, 1)] * 15
    batch = Batch(1, lengths, 128)
    plan = plan_attention(batch.metadata(range(16)), None, torch.float32)
    assert sorted((group.rows, group.length) for group in plan.singles) == [(1, 8000), (15, 10)]
    outputs, _ = batch.run()
    assert largest_error(batch, outputs) < 1e-5


def test_a_run_of_blocks_needs_no_gather():
    batch = Batch(1, [(64, 1)], 16)
    batch.blocks = [[2, 3, 4, 5]]
    assert plan_attention(batch.metadata([0]), None, torch.float32).singles[0].slots == slice(
        32, 96
    )
    batch.blocks = [[2, 3, 5, 4]]
    slots = plan_attention(batch.metadata([0]), None, torch.float32).singles[0].slots
    assert slots.tolist() == [*range(32, 64), *range(80, 96), *range(64, 80)]


def test_the_plan_is_made_once_a_step(monkeypatch):
    from hardpoint_runtime.attention import paged

    made = []

    def counting(*args):
        made.append(args)
        return plan_attention(*args)

    monkeypatch.setattr(paged, "plan_attention", counting)
    batch = Batch(4, [(9, 1), (20, 4)], 16)
    metadata = batch.metadata([0, 1])
    query = torch.cat(batch.queries)
    for _ in range(5):
        attention(query, batch.key_cache, batch.value_cache, metadata, scale=1.0)
    assert len(made) == 1
    attention(query, batch.key_cache, batch.value_cache, metadata, scale=1.0, window=3)
    assert len(made) == 2


# For FULL graphs: the same from device tensors of fixed shapes alone.


@pytest.mark.parametrize("block_size", [1, 16, 32, 128])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 20, "softcap": 2.0}, {"alibi": SLOPES}, {"alibi": SLOPES, "softcap": 3.0}],
    ids="-".join,
)
def test_fixed_attention_equals_the_formula(block_size, options):
    batch = Batch(31, random_lengths(31), block_size)
    longest = max(queries for _, queries in batch.lengths)
    outputs, padding = batch.run(fixed=(200, longest), pad_rows=2, pad_tokens=3, **options)
    assert largest_error(batch, outputs, **options) < 1e-5
    assert (padding == 0).all()


@pytest.mark.parametrize("queries", [1, 4])
def test_fixed_attention_of_uniform_rows_equals_the_formula(queries):
    batch = Batch(6, [(90, queries), (queries, queries), (7, queries)], 16)
    outputs, padding = batch.run(fixed=(128, queries), pad_rows=1, pad_tokens=queries)
    assert largest_error(batch, outputs) < 1e-5
    assert (padding == 0).all()


def test_fixed_attention_in_turns_is_the_same(monkeypatch):
    batch = Batch(12, random_lengths(12), 16)
    whole, _ = batch.run(fixed=(160, 150), pad_rows=1)
    monkeypatch.setattr(fixed, "POSITIONS", 350)
    turns, _ = batch.run(fixed=(160, 150), pad_rows=1)
    for row, out in whole.items():
        torch.testing.assert_close(turns[row], out, atol=1e-6, rtol=0)


def test_fixed_attention_reads_nothing_unwritten_and_writes_nothing_for_padding():
    """The cache is NaN but for the requests' own tokens and the first of the null block."""
    batch = Batch(14, [(130, 1), (1, 1), (2, 2), (90, 33)], 128)
    before = batch.key_cache.clone()
    before[0, 0] = batch.key_cache[0, 0] = batch.value_cache[0, 0] = 7.0
    for options in ({}, {"window": 5}, {"softcap": 2.0}):
        outputs, padding = batch.run(fixed=(256, 33), pad_rows=2, pad_tokens=4, **options)
        assert all(torch.isfinite(out).all() for out in outputs.values())
        assert (padding == 0).all()
    assert (batch.key_cache[0, 0] == 7).all()
    assert torch.isnan(batch.key_cache[0, 1:]).all(), "padding was written into the null block"
    changed = (before != batch.key_cache) & ~(torch.isnan(before) & torch.isnan(batch.key_cache))
    assert int(changed.any(-1).any(-1).sum()) == sum(queries for _, queries in batch.lengths)


def test_a_row_that_is_not_a_number_stays_alone():
    batch = Batch(15, [(40, 1), (30, 12), (17, 1)], 16)
    plain, _ = batch.run(fixed=(64, 14))
    batch.values[1][:] = torch.nan
    spoilt, _ = batch.run(fixed=(64, 14))
    assert torch.isnan(spoilt[1]).all()
    for row in (0, 2):
        assert torch.equal(spoilt[row], plain[row])


def test_fixed_attention_does_the_same_for_every_batch_of_a_shape():
    """A recording of one batch, replayed over another in the same buffers."""
    one, other = Batch(3, [(40, 1), (30, 12), (17, 1)], 16), Batch(4, [(5, 2), (60, 9), (3, 3)], 16)
    buffers = StaticBuffers(DEVICE, tokens=16, rows=4, columns=[4])
    builder = AttentionMetadataBuilder(DEVICE, 16)
    query = torch.zeros(16, HEADS, HEAD)

    def metadata(batch):
        lengths = batch.lengths
        total = sum(queries for _, queries in lengths)
        starts = [0, *itertools.accumulate(queries for _, queries in lengths)]
        return builder.build_for_graph(
            buffers.whole.groups[0],
            query_start=[*starts, total],
            seq_lens=[*(length for length, _ in lengths), 0],
            block_table=[*batch.blocks, []],
            slots=[-1] * 16,
            positions=[0] * 16,
            num_reqs=3,
            num_tokens=total,
            max_query=16,
        )

    def run(step, batch):
        return attention(query, batch.key_cache, batch.value_cache, step, scale=HEAD**-0.5)

    with torch.inference_mode():
        for batch in (one, other):
            for row, (length, _) in enumerate(batch.lengths):
                batch._put(row, 0, length)
        pool = GraphPool(lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8))
        step = metadata(one)
        graph = record_graph(lambda: run(step, one), "key", pool)
        query.copy_(torch.cat([*one.queries, torch.zeros(2, HEADS, HEAD)]))
        out = graph.replay().clone()
        assert torch.equal(out, run(metadata(one), one))
        one.key_cache[: len(other.key_cache)].copy_(other.key_cache[: len(one.key_cache)])
        one.value_cache[: len(other.value_cache)].copy_(other.value_cache[: len(one.value_cache)])
        query.copy_(torch.cat([*other.queries, torch.zeros(2, HEADS, HEAD)]))
        expected = run(metadata(other), other)
        assert not torch.equal(expected, out)
        assert torch.equal(graph.replay(), expected)
