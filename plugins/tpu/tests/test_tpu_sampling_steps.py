"""Choosing tokens on the device, stage by stage against references of a few lines, and by counts.

Each function is compiled once for its shape, as the stages are.
"""

from __future__ import annotations

from collections import Counter

import jax
import numpy as np
import pytest
from hardpoint_tpu import draws, sampling_steps

V = 50
INF = float("inf")


@pytest.fixture(scope="module")
def run():
    """The functions, compiled."""
    return {
        name: jax.jit(getattr(sampling_steps, name))
        for name in ("edit", "penalise", "greedy", "draw", "scores")
    }


def logits_of(seed: int, rows: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (rows, V)).astype(np.float32)


def drawn(run, logits, *, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0, seeds=None, position=0):
    """Draw one token a row; each parameter is a number or one for each row."""
    rows = len(logits)
    seeds = range(rows) if seeds is None else seeds
    numbers = np.stack(
        [
            np.broadcast_to(np.asarray(each, np.float32), rows)
            for each in (temperature, min_p, top_p)
        ]
    )
    top_k = np.broadcast_to(np.asarray(top_k, np.int32), rows)
    keys = draws.keys([(seed, position) for seed in seeds], rows)
    tokens, wrong = run["draw"](logits, numbers, top_k, keys, draws.steps(V))
    return np.asarray(tokens), np.asarray(wrong)


def kept(logits, *, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0) -> dict[int, float]:
    """Token -> probability of one row after the cuts, with sorting and loops."""
    scaled = np.asarray(logits, np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    weights[weights < min_p] = 0
    if top_k > 0:
        kth = np.sort(scaled)[::-1][min(top_k, V) - 1]
        weights[scaled < kth] = 0
    if top_p < 1:
        order = sorted(range(V), key=lambda i: (-weights[i], i))
        total, before = weights.sum(), 0.0
        for token in order:
            share, weights[token] = weights[token], weights[token] * (before < top_p * total)
            before += share
    weights /= weights.sum()
    return {token: float(weight) for token, weight in enumerate(weights) if weight > 0}


# A1, A2: the greedy choice.


def test_the_best_token_the_lowest_id_among_equals(run):
    logits = logits_of(0)
    logits[3, [7, 11, 30]] = 100
    tokens, wrong = run["greedy"](logits)
    assert np.asarray(tokens).tolist() == logits.argmax(-1).tolist()
    assert np.asarray(tokens)[3] == 7
    assert not np.asarray(wrong).any()


def test_a_row_without_numbers_is_counted_and_alone(run):
    logits = logits_of(1)
    expected = logits.argmax(-1)
    logits[1, 4] = np.nan
    logits[2, :3] = INF
    logits[3] = -INF
    logits[5, 9] = -INF
    drawing = drawn(run, logits, temperature=[1e-2, 1, 1, 1] + [-1] * 4)
    for tokens, wrong in (run["greedy"](logits), drawn(run, logits, temperature=-1), drawing):
        assert np.asarray(wrong).tolist() == [0, 1, 3, sampling_steps.NOTHING_LEFT, 0, 0, 0, 0]
        good = [0, 4, 5, 6, 7]
        assert np.asarray(tokens)[good].tolist() == expected[good].tolist()
        assert np.asarray(tokens)[[1, 2, 3]].tolist() == [0, 0, 0]


def test_greedy_rows_among_drawing_ones_take_the_best(run):
    logits = logits_of(2)
    tokens, _ = drawn(run, logits, temperature=[-1, 1, -1, 2, -1, 1, 1, -1], top_k=0)
    greedy = [0, 2, 4, 7]
    assert tokens[greedy].tolist() == logits.argmax(-1)[greedy].tolist()


# A3 to A6: what may be drawn, and how often.

CUTS = [
    {}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 1}, {"top_k": 5}, {"top_k": 10**6},
    {"top_p": 0.3}, {"top_p": 0.9}, {"top_p": 1e-9}, {"min_p": 0.2}, {"min_p": 1.0},
    {"top_k": 7, "top_p": 0.6}, {"temperature": 1.7, "min_p": 0.05, "top_k": 20, "top_p": 0.8},
]  # fmt: skip


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_only_what_a_cut_leaves_is_drawn_and_all_of_it_can_be(run, cut):
    logits = logits_of(3)
    seen = [Counter() for _ in logits]
    for position in range(300):
        tokens, _ = drawn(run, logits, position=position, **cut)
        for row, token in enumerate(tokens):
            seen[row][int(token)] += 1
    for row, counts in zip(logits, seen, strict=True):
        allowed = kept(row, **cut)
        assert set(counts) <= set(allowed)
        assert all(token in counts for token, share in allowed.items() if share > 0.04)


def test_top_k_keeps_ties_and_top_p_those_of_the_lowest_ids(run):
    logits = np.full((8, V), -20, np.float32)
    logits[:, [4, 9, 20, 33]] = 1.0
    wanted = {("top_k", 2): {4, 9, 20, 33}, ("top_p", 0.5): {4, 9}, ("top_p", 0.6): {4, 9, 20}}
    found = {cut: set() for cut in wanted}
    for position in range(60):
        for name, value in wanted:
            tokens, _ = drawn(run, logits, position=position, **{name: value})
            found[name, value] |= set(tokens.tolist())
    assert found == wanted


def test_top_p_of_one_changes_nothing(run):
    logits = logits_of(4)
    for position in range(20):
        plain, _ = drawn(run, logits, position=position)
        beside, _ = drawn(run, logits, position=position, top_p=[1] * 7 + [0.5])
        assert plain[:7].tolist() == beside[:7].tolist()


def test_a_row_does_not_notice_its_neighbours(run):
    logits = logits_of(5)
    wishes = {
        "temperature": [0.7, 1, -1, 2, 1, 1, 0.9, 1], "min_p": [0, 0.1, 0, 0, 0.3, 0, 0, 0],
        "top_k": [0, 5, 0, 3, 0, 0, 9, 1], "top_p": [1, 0.9, 1, 1, 1, 0.2, 0.7, 1],
    }  # fmt: skip
    together, _ = drawn(run, logits, **wishes)
    for row in range(8):
        others = logits_of(100 + row)
        others[row] = logits[row]
        own = {name: values[row] for name, values in wishes.items()}
        alone, _ = drawn(run, others, **own)
        assert alone[row] == together[row]


def test_a_draw_depends_on_seed_and_position_alone(run):
    logits = np.repeat(logits_of(6, 1), 8, 0)
    first, _ = drawn(run, logits, seeds=[5, 6, 5, 7, 5, 8, 9, 10], temperature=1.5)
    assert first[0] == first[2] == first[4]
    assert len(set(first.tolist())) > 2
    later = {int(drawn(run, logits, seeds=[5] * 8, position=p)[0][0]) for p in range(40)}
    assert len(later) > 5


CHI_SQUARE = {4: 18.467, 7: 24.322}
"""Degrees of freedom -> the value that chance exceeds once in a thousand times."""


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("cut", "freedom"), [({}, 7), ({"top_k": 5}, 4), ({"top_p": 0.9}, None)])
def test_draws_have_their_probabilities(temperature, cut, freedom):
    """20,000 draws of a distribution of eight tokens, with fixed seeds."""
    count, size = 20_000, 8
    row = np.log(np.asarray([0.3, 0.2, 0.15, 0.12, 0.1, 0.06, 0.04, 0.03], np.float32))
    wide = np.full(V, -np.inf)
    wide[:size] = row
    expected = kept(wide, temperature=temperature, **cut)
    numbers = np.stack(
        [np.full(count, each, np.float32) for each in (temperature, 0, cut.get("top_p", 1))]
    )
    tokens, _ = jax.jit(sampling_steps.draw)(
        np.broadcast_to(row, (count, size)), numbers,
        np.full(count, cut.get("top_k", 0), np.int32),
        draws.keys([(11, position) for position in range(count)], count), draws.steps(size),
    )  # fmt: skip
    seen = np.bincount(np.asarray(tokens), minlength=size)
    assert set(np.flatnonzero(seen)) == set(expected)
    square = sum((seen[i] - count * p) ** 2 / (count * p) for i, p in expected.items())
    freedom = freedom or len(expected) - 1
    bound = CHI_SQUARE.get(freedom) or {3: 16.266, 5: 20.515, 6: 22.458}[freedom]
    assert square < bound


# A7, A10 to A13: edits.


def test_forbidden_tokens_are_out_and_bias_is_added(run):
    logits = logits_of(7)
    forbidden = np.random.default_rng(0).random((8, V)) < 0.3
    bias = np.random.default_rng(1).normal(0, 50, (8, V)).astype(np.float32)
    edited = np.asarray(run["edit"](logits, forbidden, bias))
    assert (edited[forbidden] == -INF).all()
    assert (edited[~forbidden] == (logits + bias)[~forbidden]).all()


def test_penalties_are_those_of_the_loop(run):
    rng = np.random.default_rng(2)
    logits = logits_of(8)
    counts = rng.poisson(0.3, (8, V)).astype(np.int32)
    prompted = rng.random((8, V)) < 0.2
    penalties = np.stack(
        [rng.uniform(0.5, 2, 8), rng.uniform(-2, 2, 8), rng.uniform(-2, 2, 8)]
    ).astype(np.float32)
    penalties[:, 4] = (1, 0, 0)
    found = np.asarray(run["penalise"](logits, counts, prompted, penalties))
    for row in range(8):
        repetition, frequency, presence = penalties[:, row].astype(float)
        for token in range(V):
            x = float(logits[row, token])
            if counts[row, token] or prompted[row, token]:
                x = x / repetition if x > 0 else x * repetition
            if counts[row, token]:
                x -= frequency * counts[row, token] + presence
            assert found[row, token] == pytest.approx(x, rel=1e-5, abs=1e-5)
    assert (found[4] == logits[4]).all()


# A8: log-probabilities.


def test_log_probabilities_ranks_and_the_best(run):
    logits = logits_of(9)
    logits[2, [3, 8]] = logits[2].max()
    tokens = np.asarray([0, 5, 8, 9, 1, 2, 3, 4], np.int32)
    gather = jax.jit(lambda x, t: sampling_steps.gather(x, t, 4))
    logits[5, 1:8] = logits[5].max()
    own, ranks, ids, values, last = map(np.asarray, gather(logits, tokens))
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    for row in range(8):
        assert own[row] == pytest.approx(expected[row, tokens[row]], abs=1e-4)
        assert ranks[row] == (expected[row] >= expected[row, tokens[row]]).sum()
        order = sorted(range(V), key=lambda i: (-expected[row, i], i))[:4]
        assert ids[row].tolist() == order
        np.testing.assert_allclose(values[row], expected[row, order], atol=1e-4)
        assert last[row] == (expected[row] >= expected[row, order[-1]]).sum()
    assert last[5] > 4
    np.testing.assert_allclose(np.asarray(run["scores"](logits)), expected, atol=1e-4)


def test_the_rank_in_a_row_without_numbers_is_one():
    logits = np.full((1, V), np.nan, np.float32)
    _, ranks, *_ = sampling_steps.gather(logits, np.asarray([0], np.int32), 1)
    assert np.asarray(ranks).tolist() == [1]
