from __future__ import annotations

import numpy as np
from hardpoint_runtime.sampling.draws import BITS, uniform, uniforms


def test_the_documented_function():
    """Fixed for ever: a seed given by a user gives the same tokens in later versions."""
    assert [uniform(0, 0), uniform(1, 0), uniform(0, 1), uniform(0, 0, 1)] == [
        0.6978145241737366, 0.9327598214149475, 0.9655433297157288, 0.01090329885482788,
    ]  # fmt: skip


def test_draws_are_in_the_unit_interval_and_exact_in_float32():
    drawn = uniforms((seed, at) for seed in range(200) for at in range(100))
    assert drawn.dtype == np.float32
    assert drawn.min() >= 0
    assert drawn.max() < 1
    scaled = drawn.astype(np.float64) * (1 << BITS)
    assert (scaled == np.floor(scaled)).all()


def test_seeds_of_any_size_differ():
    assert len({uniform(seed, 0) for seed in (0, 1 << 64, (1 << 64) + 1, 1 << 200)}) == 4


def test_draws_are_even_over_seeds_and_over_positions():
    for drawn in (
        uniforms((seed, 5) for seed in range(20_000)),
        uniforms((5, at) for at in range(20_000)),
    ):
        counts = np.bincount((drawn * 20).astype(int), minlength=20)
        chi2 = ((counts - 1000) ** 2 / 1000).sum()
        assert chi2 < 43.8  # 19 degrees of freedom, p > 0.001


def test_neighbouring_keys_are_not_correlated():
    first = uniforms((seed, 0) for seed in range(20_000))
    for second in (
        uniforms((seed + 1, 0) for seed in range(20_000)),
        uniforms((seed, 1) for seed in range(20_000)),
        uniforms(((seed, 0) for seed in range(20_000)), lane=1),
    ):
        assert abs(np.corrcoef(first, second)[0, 1]) < 4 / np.sqrt(20_000)
