"""Each kernel beside the torch operation whose work it does, under Triton's interpreter. Collected
by ``test_kernels_interpreted.py`` only: the interpreter is the process's.
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hardpoint_runtime.attention import paged
from hardpoint_runtime.attention import slots as plain_slots
from hardpoint_runtime.batch.block_table import context_parallel_slots
from hardpoint_runtime.graphs.recorded import GraphPool, record_graph
from hardpoint_runtime.kernels import attention as attention_kernels
from hardpoint_runtime.kernels import blocks, filters, kv_write, penalties, rejection, slots, tiles
from hardpoint_runtime.kernels import paged_decode as decode
from hardpoint_runtime.memory import blocks as plain_blocks
from hardpoint_runtime.sampling import draws, edits
from hardpoint_runtime.sampling import filters as plain_filters
from hardpoint_runtime.sampling import rejection as plain_rejection
from interpreted_bfloat16 import mended
from triton import knobs

NEIGHBOUR = Path(__file__).resolve().parents[1] / "model" / "test_attention_paged.py"


def test_the_interpreter_runs():
    assert knobs.runtime.interpret


# Attention and its cache: the batches of the plain operation's own tests.


@pytest.fixture(scope="module")
def paged_tests():
    spec = importlib.util.spec_from_file_location("paged_batches", NEIGHBOUR)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def both(module, batch, monkeypatch, **how):
    """Run a batch by kernels, then the same by torch; return both outputs."""
    monkeypatch.setattr(module, "kv_write", kv_write.kv_write)
    monkeypatch.setattr(module, "attention", attention_kernels.attention)
    found = batch.run(**how)
    written = batch.key_cache.clone(), batch.value_cache.clone()
    monkeypatch.setattr(module, "kv_write", paged.kv_write)
    monkeypatch.setattr(module, "attention", paged.attention)
    expected = batch.run(**how)
    for ours, theirs in zip(written, (batch.key_cache, batch.value_cache), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0, equal_nan=True)
    return found, expected


OPTIONS = {
    "plain": {},
    "window": {"window": 20},
    "cap": {"softcap": 2.0},
    "all": {"window": 9, "softcap": 3.0, "alibi": torch.tensor([2.0**-n for n in range(1, 7)])},
}


@pytest.mark.parametrize(
    ("block_size", "options"), [(1, "plain"), (16, "window"), (128, "cap"), (24, "all")]
)
def test_attention_over_random_mixtures(paged_tests, monkeypatch, block_size, options):
    """Decodes, whole prompts and chunks with contexts; everything else in the cache is NaN."""
    seed = 100 + block_size
    batch = paged_tests.Batch(seed, paged_tests.random_lengths(seed, rows=5), block_size)
    (found, _), (expected, _) = both(paged_tests, batch, monkeypatch, **OPTIONS[options])
    for row, out in expected.items():
        torch.testing.assert_close(found[row], out, atol=2e-6, rtol=0)
    assert paged_tests.largest_error(batch, found, **OPTIONS[options]) < 1e-5


@pytest.mark.parametrize(
    ("head", "group", "block_size", "options"),
    [
        (64, 1, 8, "plain"), (64, 7, 32, "window"), (80, 2, 16, "cap"), (80, 5, 8, "plain"),
        (96, 3, 32, "all"), (96, 8, 16, "window"), (128, 4, 8, "cap"), (128, 6, 32, "plain"),
        (256, 1, 32, "window"), (256, 8, 16, "all"),
    ],
)  # fmt: skip
def test_sizes_of_models(paged_tests, monkeypatch, head, group, block_size, options):
    heads = 2 * group
    for name, value in (("HEAD", head), ("KV_HEADS", 2), ("HEADS", heads)):
        monkeypatch.setattr(paged_tests, name, value)
    how = dict(OPTIONS[options])
    if "alibi" in how:
        how["alibi"] = torch.tensor([2.0**-n for n in range(1, heads + 1)])
    batch = paged_tests.Batch(head + group, [(1, 1), (33, 1), (9, 9), (25, 2)], block_size)
    (found, _), (expected, _) = both(paged_tests, batch, monkeypatch, **how)
    for row, out in expected.items():
        torch.testing.assert_close(found[row], out, atol=4e-6, rtol=0)
    assert paged_tests.largest_error(batch, found, **how) < 1e-5


@pytest.mark.parametrize("rows", [0, 1])
def test_no_row_and_one_token(paged_tests, monkeypatch, rows):
    batch = paged_tests.Batch(1, [(1, 1)], 16)
    (found, padding), (expected, _) = both(
        paged_tests, batch, monkeypatch, order=list(range(rows)), pad_rows=1 - rows, pad_tokens=1
    )
    assert len(found) == len(expected) == rows
    for row, out in expected.items():
        torch.testing.assert_close(found[row], out, atol=1e-7, rtol=0)
    assert (padding == 0).all()


@pytest.mark.parametrize("queries", [1, 9])
def test_caches_of_more_numbers_than_32_bits_count(paged_tests, monkeypatch, queries):
    """Of the host's memory only what is touched is taken."""
    monkeypatch.setattr(paged_tests, "HEAD", 128)
    small, large = (
        paged_tests.Batch(1, [(40, queries)], 16, dtype=torch.float16, head_v=128) for _ in range(2)
    )
    first = (1 << 31) // large.key_cache[0].numel()
    large.blocks = [[first + block for block in blocks] for blocks in large.blocks]
    for name in ("key_cache", "value_cache"):
        near = getattr(large, name)
        far = torch.empty(first + len(near), *near.shape[1:], dtype=near.dtype)
        far[first:] = near
        setattr(large, name, far)
    expected, _ = small.run()
    monkeypatch.setattr(paged_tests, "kv_write", kv_write.kv_write)
    monkeypatch.setattr(paged_tests, "attention", attention_kernels.attention)
    found, _ = large.run()
    torch.testing.assert_close(found[0], expected[0], atol=2e-3, rtol=0)
    for ours, theirs in (
        (large.key_cache, small.key_cache), (large.value_cache, small.value_cache)
    ):  # fmt: skip
        torch.testing.assert_close(ours[first:], theirs, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("fixed", [None, (64, 12), (64, 1)])
def test_padding_is_inert(paged_tests, monkeypatch, fixed):
    lengths = [(33, 1), (7, 1)] if fixed == (64, 1) else [(33, 1), (40, 12), (5, 5)]
    batch = paged_tests.Batch(3, lengths, 16)
    if fixed:  # the plain operation for graphs reads and writes the first slot of nobody
        batch.key_cache[0, 0] = batch.value_cache[0, 0] = 7.0
    how = {"pad_rows": 2, "pad_tokens": 5, "fixed": fixed}
    (found, padding), (expected, _) = both(paged_tests, batch, monkeypatch, **how)
    for row, out in expected.items():
        torch.testing.assert_close(found[row], out, atol=2e-6, rtol=0)
    assert (padding == 0).all()


@pytest.mark.parametrize("longest", [1300, 17000])
def test_long_rows_are_cut_into_parts(paged_tests, monkeypatch, longest):
    assert decode.num_parts(longest)[0] > 1
    monkeypatch.setattr(decode, "PART", 64 if longest < 2000 else 512)
    batch = paged_tests.Batch(1, [(200, 1), (3, 1), (64, 1)], 16)
    window = {"window": 70} if longest < 2000 else {}
    how = {"fixed": (longest, 1), "pad_rows": 1, "pad_tokens": 1}
    batch.key_cache[0, 0] = batch.value_cache[0, 0] = 7.0
    (found, _), (expected, _) = both(paged_tests, batch, monkeypatch, **how, **window)
    for row, out in expected.items():
        torch.testing.assert_close(found[row], out, atol=2e-6, rtol=0)


def test_a_row_is_the_same_bit_by_bit_whatever_is_beside_it(paged_tests, monkeypatch):
    monkeypatch.setattr(decode, "PART", 32)
    monkeypatch.setattr(paged_tests, "kv_write", kv_write.kv_write)
    monkeypatch.setattr(paged_tests, "attention", attention_kernels.attention)
    batch = paged_tests.Batch(5, [(100, 1), (40, 9), (500, 1)], 16)
    together, _ = batch.run()
    for row, out in together.items():
        alone, _ = batch.run([row])
        assert torch.equal(alone[row], out)


def test_16_bit_numbers_and_values_of_another_size(paged_tests, monkeypatch):
    """In float16."""
    batch = paged_tests.Batch(2, [(50, 1), (20, 20)], 16, dtype=torch.float16, head_v=24)
    (found, _), _ = both(paged_tests, batch, monkeypatch)
    assert paged_tests.largest_error(batch, found) < 5e-3


@pytest.mark.parametrize("lengths", [[(50, 1), (90, 1)], [(50, 1), (20, 20), (60, 9)]])
@pytest.mark.parametrize("options", ["plain", "all"])
def test_bfloat16(paged_tests, monkeypatch, lengths, options):
    """Within what rounding to bfloat16, by at most u = 2**-9 of a number, may do.

    What is in the cache is exact, and products of two such numbers are so in float32. Shares of at
    most 1, which add up to the weight that they are divided by, are rounded before they are
    multiplied: that moves a result by at most u of the largest value. The result is rounded once
    more. Twice u of the largest value holds both; one part in 256 of that is left for float32.
    """
    mended(monkeypatch)
    batch = paged_tests.Batch(6, lengths, 16, dtype=torch.bfloat16)
    (found, _), _ = both(paged_tests, batch, monkeypatch, **OPTIONS[options])
    largest = max(float(value.abs().max()) for value in batch.values)
    bound = 2 * 2.0**-9 * largest * (1 + 1 / 256)
    assert 0 < paged_tests.largest_error(batch, found, **OPTIONS[options]) <= bound


def test_numbers_are_stored_as_the_nearest_bfloat16(paged_tests, monkeypatch):
    """``both`` compares the caches to the bit."""
    mended(monkeypatch)
    batch = paged_tests.Batch(2, [(50, 1), (20, 20)], 16, cache_dtype=torch.bfloat16)
    (found, _), (expected, _) = both(paged_tests, batch, monkeypatch)
    for row, out in expected.items():
        torch.testing.assert_close(found[row], out, atol=2e-6, rtol=0)


@pytest.mark.parametrize("head", [40, 72])
def test_large_heads_are_multiplied_in_parts(paged_tests, monkeypatch, head):
    monkeypatch.setattr(tiles, "WHOLE_HEAD", 32)
    monkeypatch.setattr(tiles, "PART_BYTES", 64)
    monkeypatch.setattr(paged_tests, "HEAD", head)
    batch = paged_tests.Batch(4, [(50, 1), (20, 20)], 16, head_v=24)
    (found, _), _ = both(paged_tests, batch, monkeypatch, **OPTIONS["all"])
    assert paged_tests.largest_error(batch, found, **OPTIONS["all"]) < 1e-5


def test_a_cache_of_another_type(paged_tests, monkeypatch):
    batch = paged_tests.Batch(2, [(50, 1), (20, 20)], 16, cache_dtype=torch.float16)
    (found, _), (expected, _) = both(paged_tests, batch, monkeypatch)
    for row, out in expected.items():
        torch.testing.assert_close(found[row], out, atol=2e-6, rtol=0)


def test_a_recorded_graph_keeps_the_launches(paged_tests):
    """Where graphs are recorded lists: replayed over another batch in the same buffers."""
    one = paged_tests.Batch(3, [(40, 1), (30, 1)], 16)
    metadata = one.metadata([0, 1], fixed=(64, 1))
    query = torch.cat(one.queries)
    key, value = (torch.cat([part[-1:] for part in parts]) for parts in (one.keys, one.values))

    def work():
        kv_write.kv_write(key, value, one.key_cache, one.value_cache, metadata)
        return attention_kernels.attention(
            query, one.key_cache, one.value_cache, metadata, scale=0.25
        )

    with torch.inference_mode():
        expected = work().clone()
        graph = record_graph(work, "key", GraphPool(lambda n: torch.zeros(n, dtype=torch.uint8)))
        graph.output.zero_()
        assert torch.equal(graph.replay(), expected)
        query.mul_(2)
        assert torch.equal(graph.replay(), work())
        assert not torch.equal(graph.output, expected)


# Slots and blocks.


@pytest.mark.parametrize("seed", range(6))
def test_slot_mapping(seed, monkeypatch):
    monkeypatch.setattr(slots, "TOKENS", 16)
    source = random.Random(seed)
    block_size, size = source.choice([(1, 1), (16, 1), (7, 1), (4, 3), (16, 2)])
    interleave = source.choice([each for each in (1, 2, block_size) if block_size % each == 0])
    rank = source.randrange(size)
    counts = [source.choice([1, 1, 5, 40]) for _ in range(source.randint(1, 6))]
    starts = np.cumsum([0, *counts])
    firsts = [source.randrange(50) for _ in counts]
    positions = np.concatenate([np.arange(f, f + n) for f, n in zip(firsts, counts, strict=True)])
    table = np.random.default_rng(seed).integers(1, 999, (len(counts) + 2, 100)).astype(np.int32)
    row_of_token = np.repeat(np.arange(len(counts)), counts)
    expected = context_parallel_slots(
        table, row_of_token, positions, block_size=block_size, size=size, rank=rank,
        interleave=interleave,
    )  # fmt: skip
    pad = source.randrange(4)
    starts = np.concatenate([starts, [starts[-1]] * 2])
    most = source.choice([1, max(counts)])
    for module in (slots, plain_slots):
        found = module.slot_mapping(
            torch.from_numpy(table), torch.from_numpy(starts.astype(np.int32)),
            torch.from_numpy(np.concatenate([positions, np.zeros(pad, dtype=np.int64)])),
            block_size=block_size, max_query=most, size=size, rank=rank, interleave=interleave,
        )  # fmt: skip
        assert found.tolist() == [*expected.tolist(), *[-1] * pad]


def test_slots_beyond_32_bits():
    table = torch.tensor([[200_000_000, 7]], dtype=torch.int32)
    found = slots.slot_mapping(
        table, torch.tensor([0, 2], dtype=torch.int32), torch.tensor([3, 17]), block_size=16,
        max_query=2,
    )  # fmt: skip
    assert found.tolist() == [3_200_000_003, 7 * 16 + 1]


@pytest.mark.parametrize("word", [torch.int8, torch.int32])
def test_blocks_beyond_32_bits(word):
    """Addresses count the integers that blocks are moved as: those of 8 bits, where a block's bytes
    are no multiple of 4.
    """
    width = 2047 if word == torch.int8 else 1 << 14
    first = (1 << 31) // width + 1
    plane = torch.empty(first + 3, width, dtype=word)
    plane[first:] = torch.arange(1, 4, dtype=word)[:, None]
    chosen = torch.tensor([first, first + 1])
    blocks.copy_blocks([plane], chosen, chosen + 1, overlapping=True)
    assert plane[first:].unique(dim=1).flatten().tolist() == [1, 1, 2]
    blocks.zero_blocks([plane], chosen[1:])
    assert plane[first:].unique(dim=1).flatten().tolist() == [1, 0, 2]


def test_a_step_may_move_more_blocks_than_a_grid_is_high(monkeypatch):
    """Devices start 65,535 programs along the second axis and the third, more along the first."""
    grids = []

    class Grids:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *arguments, **more: None

    for name in ("zero_blocks_kernel", "copy_blocks_kernel"):
        monkeypatch.setattr(blocks, name, Grids())
    many = torch.arange(70_000)
    planes = [torch.empty(1, 4) for _ in range(3)]
    blocks.zero_blocks(planes, many)
    blocks.copy_blocks(planes, many, many, overlapping=False)
    assert grids == [(70_000, 3, 1)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(9, 16, 2, 8), (9, 3, 1, 5), (9, 5, 3, 101)])
def test_blocks(dtype, shape):
    generator = torch.Generator().manual_seed(1)
    planes = [torch.randint(-9, 9, shape, generator=generator).to(dtype) for _ in range(3)]
    expected = [plane.clone() for plane in planes]
    zeroed = torch.tensor([3, 8])
    blocks.zero_blocks(planes, zeroed)
    plain_blocks.zero_blocks(expected, zeroed)
    for copies in ([(1, 2), (1, 4)], [(5, 6), (6, 5), (7, 1)]):
        sources, targets = (torch.tensor(side) for side in zip(*copies, strict=True))
        overlapping = len(copies) == 3
        blocks.copy_blocks(planes, sources, targets, overlapping=overlapping)
        plain_blocks.copy_blocks(expected, sources, targets, overlapping=overlapping)
    for found, plane in zip(planes, expected, strict=True):
        assert torch.equal(found, plane)


# Sampling.


@pytest.mark.parametrize("places", [0, 1, 300])
def test_penalties(places):
    generator = torch.Generator().manual_seed(places)
    logits = torch.randn(3, 211, generator=generator)
    flat = torch.randperm(logits.numel(), generator=generator)[:places]
    values = torch.rand(4, places, generator=generator) * 2 + 0.1
    values[3] = values[3].mul(2).floor()
    expected = logits.clone()
    penalties.penalise(logits, flat, *values)
    edits.penalise_places(expected, flat, *values)
    assert torch.equal(logits, expected)


def random_logits(seed, rows, vocabulary):
    """Some rows with many equal values, as 16-bit logits have, and one with -inf."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    logits[0] = logits[0].mul(2).round() / 2
    logits[-1, ::3] = -torch.inf
    return logits


@pytest.mark.parametrize("vocabulary", [1, 97, 4099])
def test_temperature_and_min_p(vocabulary):
    logits = random_logits(vocabulary, 4, vocabulary)
    logits[-1, 0] = 0.5
    temperature, min_p = torch.tensor([0.5, 1.0, 1.3, 2.0]), torch.tensor([0.0, 0.1, 0.3, 0.05])
    for heat in (None, temperature):
        for least in (None, min_p):
            found = filters.temper(logits, heat, least)
            torch.testing.assert_close(
                found, plain_filters.tempered(logits, heat, least), atol=0, rtol=0
            )


@pytest.mark.parametrize("seed", range(4))
def test_top_k_and_top_p(seed):
    source = random.Random(seed)
    vocabulary = source.choice([7, 501, 1500])
    scaled = plain_filters.tempered(random_logits(seed, 5, vocabulary), None, None)
    top_k = torch.tensor([source.choice([0, 1, 3, vocabulary // 2, vocabulary]) for _ in range(5)])
    top_p = torch.tensor([source.choice([0.1, 0.5, 0.83, 0.99, 1.0]) for _ in range(5)])
    found = filters.truncate(scaled, top_k, top_p)
    expected = plain_filters.truncated(scaled, top_k, top_p)
    assert torch.equal(found, expected)
    keys = torch.arange(5) * 977 + seed
    drawn = [
        draw(
            scaled.clone(), keys, top_k, top_p, largest_k=int(top_k.max()),
            all_cut_by_k=bool((top_k > 0).all()),
            anyone=lambda flags: flags.nonzero()[:, 0].tolist(),
        )
        for draw in (filters.draw_truncated, plain_filters.draw_truncated)
    ]  # fmt: skip
    assert torch.equal(*drawn)


def test_ties_at_the_edge_of_top_p_stay_by_id():
    scaled = torch.tensor([[-1.0, 0.0, -1.0, -1.0, -2.0]]).expand(2, -1).contiguous()
    top_k, top_p = torch.tensor([0, 4]), torch.tensor([0.7, 0.8])
    found = filters.truncate(scaled, top_k, top_p)
    assert torch.equal(found, plain_filters.truncated(scaled, top_k, top_p))
    assert found.isfinite().sum(1).tolist() == [3, 3]


# Speculative decoding.


def proposals(seed, counts, vocabulary, *, with_proposed):
    generator = torch.Generator().manual_seed(seed)
    starts = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32)
    total = int(starts[-1])

    def shares(*shape):
        return (torch.randn(*shape, generator=generator) * 2).softmax(-1)

    proposed = shares(total, vocabulary)
    drafts = proposed.multinomial(1, generator=generator)[:, 0].int() if total else starts[:0]
    return {
        "drafts": drafts,
        "starts": starts,
        "target": (shares(total, vocabulary) + proposed) / 2,
        "proposed": proposed if with_proposed else None,
        "shares": torch.rand(total, generator=generator, dtype=torch.float64)
        * (1 if with_proposed else 0.2),
        "keys": torch.randint(-(2**62), 2**62, (total,), generator=generator),
        "bonus": torch.randint(0, vocabulary, (len(counts),), generator=generator),
        "most": max(counts),
    }


@pytest.mark.parametrize("with_proposed", [True, False])
@pytest.mark.parametrize(
    ("counts", "vocabulary"), [([3, 0, 2, 1], 50), ([1], 2501), ([7, 7], 97), ([0, 0], 50)]
)
def test_rejection_of_drawn_drafts(counts, vocabulary, with_proposed):
    for seed in range(2):
        given = proposals(seed, counts, vocabulary, with_proposed=with_proposed)
        found, expected = (module.accept_drawn(**given) for module in (rejection, plain_rejection))
        assert torch.equal(found, expected)


def test_where_nothing_is_left_the_whole_is_drawn_from():
    """The draft's probabilities are nowhere below the target's, yet it is rejected, by rounding."""
    given = proposals(4, [3, 2], 50, with_proposed=True)
    given["target"] = given["proposed"] * (1 - 1e-6)
    given["shares"] = torch.full_like(given["shares"], 1 - 1e-9)
    found, expected = (module.accept_drawn(**given) for module in (rejection, plain_rejection))
    assert torch.equal(found, expected)
    assert (found[:, 1:] == -1).all()


@pytest.mark.parametrize("counts", [[3, 0, 2, 1], [0], [5, 5, 5]])
def test_rejection_of_greedy_drafts(counts):
    given = proposals(1, counts, 11, with_proposed=False)
    best = torch.where(torch.arange(len(given["drafts"])) % 3 == 1, 4, given["drafts"].long())
    arguments = (given["drafts"], given["starts"], best, given["bonus"], given["most"])
    found = rejection.accept_greedy(*arguments)
    assert torch.equal(found, plain_rejection.accept_greedy(*arguments))


def test_draws_are_the_rule_s():
    """Each token's number, to the last digits, seen by which of two weights wins."""
    from hardpoint_runtime.kernels.rejection import recover_kernel

    vocabulary = 64
    weights = torch.rand(40, vocabulary, generator=torch.Generator().manual_seed(2))
    keys = torch.arange(40) * 7919 - 11
    recovered = torch.empty(40, dtype=torch.int64)
    nothing = torch.full((40,), vocabulary + 1, dtype=torch.int32)
    recover_kernel[(40,)](
        nothing, weights, weights, keys, recovered, vocabulary, WITH_PROPOSED=False, TOKENS=32,
        enable_fp_fusion=False,
    )  # fmt: skip
    expected = draws.race(weights / weights.amax(-1, keepdim=True), keys, torch.arange(vocabulary))
    assert torch.equal(recovered, expected)
