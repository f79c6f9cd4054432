"""Temperature, min-p, top-k, top-p and the draw, against a few plain lines for one row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hardpoint_runtime.sampling import filters
from hardpoint_runtime.sampling.draws import keys

DRAWS = 20_000


def reference(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The probabilities of one row, in float64."""
    scaled = [x / temperature for x in logits]
    best = max(scaled)
    weights = [math.exp(x - best) for x in scaled]
    weights = [w if w >= min_p else 0.0 for w in weights]
    if 0 < top_k < len(weights):
        kth = sorted(weights, reverse=True)[top_k - 1]
        weights = [w if w >= kth else 0.0 for w in weights]
    order = sorted(range(len(weights)), key=lambda i: (weights[i], -i))  # rising, ids fall
    running, total = 0.0, sum(weights)
    if top_p < 1:
        for place, i in enumerate(order):
            running += weights[i] / total
            if running <= 1 - top_p + 1e-9 and place < len(order) - 1:
                weights[i] = 0.0
    return [w / sum(weights) for w in weights]


def draw_many(logits, count=DRAWS, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1):
    rows = torch.tensor([logits], dtype=torch.float32).expand(count, -1).contiguous()
    scaled = filters.tempered(
        rows, torch.full((count,), temperature), torch.full((count,), min_p) if min_p else None
    )
    drawn_by = torch.from_numpy(keys((seed, at) for at in range(count)))
    if top_k or top_p < 1:
        return filters.draw_truncated(
            scaled,
            drawn_by,
            torch.full((count,), top_k),
            torch.full((count,), top_p),
            largest_k=top_k,
            all_cut_by_k=top_k > 0,
            anyone=lambda flags: flags.nonzero()[:, 0].tolist(),
        )
    return filters.draw(scaled, drawn_by)


def chi_square_p(counts, probabilities):
    """The upper tail of the chi-square distribution (regularised incomplete gamma function)."""
    expected = np.asarray(probabilities) * sum(counts)
    used = expected > 0
    assert not np.asarray(counts)[~used].any(), "drew what has no probability"
    if used.sum() == 1:
        return 1.0
    statistic = float((((counts - expected) ** 2)[used] / expected[used]).sum())
    freedom = torch.tensor((used.sum() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


LOGITS = [2.0, 1.0, 0.5, 0.5, 0.0, -0.5, -1.0, -2.0, 1.5, -3.0]


@pytest.mark.parametrize(
    "cut",
    [
        {"temperature": 0.5},
        {"temperature": 1.0},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": 4},  # its fourth best is one of two equals
        {"top_p": 0.9},
        {"top_p": 0.5},
        {"top_p": 0.05},
        {"min_p": 0.2},
        {"min_p": 0.9},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.8, "min_p": 0.1},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.95},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(cut):
    counts = np.bincount(draw_many(LOGITS, **cut).numpy(), minlength=len(LOGITS))
    assert counts.sum() == DRAWS
    assert chi_square_p(counts, reference(LOGITS, **cut)) > 0.001


def test_the_chi_square_test_can_fail():
    counts = np.bincount(draw_many(LOGITS, temperature=1.1).numpy(), minlength=len(LOGITS))
    assert chi_square_p(counts, reference(LOGITS)) < 1e-6


def test_a_large_vocabulary():
    logits = torch.randn(600, generator=torch.Generator().manual_seed(0)).double().tolist()
    counts = np.bincount(draw_many(logits, 30_000).numpy(), minlength=600)
    assert chi_square_p(counts, reference(logits)) > 0.001


def test_the_few_likely_tokens_of_a_vocabulary_of_unlikely_ones():
    """Half of the weight is on 4 tokens, the other half evenly on 49,148."""
    size, count = 49_152, 2_000
    row = torch.zeros(size)
    row[[0, 300, 20_000, size - 1]] = math.log((size - 4) / 4)
    parts = [
        filters.draw(filters.tempered(row.repeat(100, 1), None, None), some)
        for some in torch.from_numpy(keys((2, at) for at in range(count))).split(100)
    ]
    drawn = torch.cat(parts)
    likely = torch.tensor([0, 300, 20_000, size - 1])
    counts = [int((drawn == token).sum()) for token in likely]
    rest = drawn[~torch.isin(drawn, likely)]
    pieces = np.bincount((rest * 50 // size).numpy(), minlength=50).tolist()
    assert chi_square_p([*counts, *pieces], [0.125] * 4 + [0.01] * 50) > 0.001


@pytest.mark.parametrize("trend", [False, True])
def test_noise_in_the_logits_hardly_ever_changes_a_draw(trend):
    """A matrix product rounds otherwise for a batch than for a row: about one part in 10^6, each
    token by itself or, with a trend over the ids, so that the cumulative sum moves too.
    """
    size, count, generator = 49_152, 2_000, torch.Generator().manual_seed(11)
    changed = 0
    for some in torch.from_numpy(keys((7, at) for at in range(count))).split(50):
        logits = torch.randn(50, size, generator=generator) + 10
        noise = torch.linspace(-1, 1, size) if trend else torch.randn(50, size, generator=generator)
        first = filters.draw(filters.tempered(logits, None, None), some)
        second = filters.draw(filters.tempered(logits * (1 + noise * 1e-6), None, None), some)
        changed += int((first != second).sum())
    assert changed <= 2


def test_both_ways_of_drawing_give_the_same_token():
    """The whole vocabulary, and candidates of which a cut leaves out nothing."""
    count, size = 500, 3000
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(count, size, generator=generator) * 2
    by = torch.from_numpy(keys((9, at) for at in range(count)))
    whole = filters.draw(filters.tempered(logits, None, None), by)
    ways = {
        "no cut": (0, 1.0, 0),
        "k leaves out the worst": (size - 1, 1.0, size - 1),
        "p leaves out almost nothing": (0, 1 - 1e-7, 0),
    }
    for way, (top_k, top_p, largest_k) in ways.items():
        narrow = filters.draw_truncated(
            filters.tempered(logits, None, None),
            by,
            torch.full((count,), top_k),
            torch.full((count,), top_p),
            largest_k=largest_k,
            all_cut_by_k=top_k > 0,
            anyone=lambda flags: flags.nonzero()[:, 0].tolist(),
        )
        assert narrow.tolist() == whole.tolist(), way


def support(logits, count=4001, **cut):
    """Which ids can be drawn, found by drawing often."""
    rows = torch.tensor([logits], dtype=torch.float32).expand(count, -1).contiguous()
    scaled = filters.tempered(
        rows,
        torch.ones(count),
        torch.full((count,), cut["min_p"]) if cut.get("min_p") else None,
    )
    drawn = filters.draw_truncated(
        scaled,
        torch.from_numpy(keys((3, at) for at in range(count))),
        torch.full((count,), cut.get("top_k", 0)),
        torch.full((count,), cut.get("top_p", 1.0)),
        largest_k=cut.get("top_k", 0),
        all_cut_by_k=cut.get("top_k", 0) > 0,
        anyone=lambda flags: flags.nonzero()[:, 0].tolist(),
    )
    return set(drawn.tolist())


def test_top_k_keeps_ties():
    assert support([1.0, 1.0, 1.0, 0.5, 0.0], top_k=2) == {0, 1, 2}
    assert support([0.0, 2.0, 1.0, 1.0, -1.0], top_k=2) == {1, 2, 3}
    assert support([0.0, 2.0, 1.0, 0.9], top_k=9) == {0, 1, 2, 3}


def test_top_k_ties_beyond_the_candidates_first_looked_at():
    logits = [1.0] * (filters.CANDIDATES * 2) + [0.0] * 1000
    counts = np.bincount(draw_many(logits, top_k=3, count=200).numpy(), minlength=len(logits))
    assert counts[: filters.CANDIDATES * 2].sum() == 200
    assert (counts[filters.CANDIDATES : filters.CANDIDATES * 2] > 0).sum() > 50


def test_top_p_beyond_the_candidates_first_looked_at():
    """A flat distribution: nine tenths of it are far more than the candidates."""
    size = filters.CANDIDATES * 10
    logits = np.linspace(0, 0.01, size)
    kept = support(logits.tolist(), count=600, top_p=0.9)
    lowest = size - round(0.9 * size)
    assert lowest - size // 100 <= min(kept) <= lowest + size // 100
    assert max(kept) >= size - size // 100


def test_top_p_keeps_at_least_the_best():
    assert support([3.0, 2.9, 1.0], top_p=1e-6) == {0}


def test_top_p_is_applied_to_what_top_k_left():
    probabilities = [0.4, 0.3, 0.2, 0.1]
    logits = [math.log(p) for p in probabilities]
    # Among the three best, shares are 4/9, 3/9, 2/9: two reach 0.75. Of all four, it takes three.
    assert support(logits, top_p=0.75) == {0, 1, 2}
    assert support(logits, top_k=3, top_p=0.75) == {0, 1}
    # The same after min-p, which leaves three.
    assert support(logits, min_p=0.4, top_p=0.75) == {0, 1}


def test_a_row_does_not_depend_on_the_cuts_beside_it():
    generator = torch.Generator().manual_seed(3)
    scaled = filters.tempered(torch.randn(6, 5000, generator=generator) * 2, torch.ones(6), None)
    by = torch.from_numpy(keys((8, at) for at in range(6)))
    top_k = torch.tensor([0, 5, 0, 4000, 50, 0])
    top_p = torch.tensor([0.9, 1.0, 0.99, 0.9, 0.5, 0.1])

    def draw(rows):
        return filters.draw_truncated(
            scaled[rows],
            by[rows],
            top_k[rows],
            top_p[rows],
            largest_k=int(top_k[rows].max()),
            all_cut_by_k=bool((top_k[rows] > 0).all()),
            anyone=lambda flags: flags.nonzero()[:, 0].tolist(),
        ).tolist()

    together = draw(list(range(6)))
    assert together == [draw([row])[0] for row in range(6)]
    assert together[::-1] == draw(list(range(6))[::-1])


def test_equal_logits_are_ranked_by_id():
    values = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 2.0]])
    for count in range(1, 7):
        best, ids = filters.ranked(values, count)
        assert ids.tolist() == [[1, 2, 4, 3, 5, 0][:count]]
        assert best.tolist() == [[3.0, 3.0, 3.0, 2.0, 2.0, 1.0][:count]]


def test_what_is_impossible_is_never_drawn():
    logits = torch.full((2000, 700), -torch.inf)
    logits[:, [3, 300, 650]] = 0.0
    by = torch.from_numpy(keys((6, at) for at in range(2000)))
    drawn = filters.draw(filters.tempered(logits, torch.ones(2000), None), by)
    counts = np.bincount(drawn.numpy(), minlength=700)
    assert counts[[3, 300, 650]].min() > 600
    assert counts.sum() == counts[[3, 300, 650]].sum()


def test_a_row_that_is_not_a_number_stays_inside_the_vocabulary():
    logits = torch.full((2, 300), torch.nan)
    logits[1] = torch.arange(300.0)
    scaled = filters.tempered(logits, torch.ones(2), None)
    drawn = filters.draw(scaled, torch.tensor([1, 2]))
    assert 0 <= drawn[0] < 300
    assert drawn[1] >= 290
