"""Log-probabilities, penalties, biases and forbidden tokens without torch: what they are, and that
nothing else is touched.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hardpoint_cpu.native import scores, sparse_edits
from hardpoint_cpu.native.library import availability
from hardpoint_engine import SamplingParams
from hardpoint_runtime.device import HostDeviceOps
from hardpoint_runtime.sampling.batch import SamplingBatch
from hardpoint_runtime.sampling.edits import Penalties, Places
from hardpoint_runtime.sampling.logprobs import LogprobAsk, gather_logprobs
from hardpoint_runtime.sampling.sampler import Sampler
from native_models import PROMPTS, engine, tokens

available = availability()
pytestmark = pytest.mark.skipif(not available.levels, reason=available.reason)


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("vocabulary", [1, 7, 97, 4099])
def test_scores_are_those_of_the_built_in_sampler(vocabulary, normalised):
    draw = np.random.default_rng(vocabulary)
    for turn in range(6):
        numbers = draw.standard_normal((8, vocabulary)).astype(np.float32) * (1 + 5 * turn)
        logits = torch.from_numpy(numbers)
        if turn % 2:
            logits = logits.to(torch.bfloat16).float()  # many are equal
        logits[1, vocabulary // 2 :] = 0.5
        logits[2, : vocabulary // 2] = -torch.inf
        logits[3, vocabulary // 3] = torch.nan
        logits[4, vocabulary // 3] = torch.inf
        logits[5] = -torch.inf
        chosen = draw.integers(0, vocabulary, 8).tolist()
        asks = [
            LogprobAsk(
                row=row,
                count=min(vocabulary, int(draw.choice([0, 1, 5, 40, vocabulary]))),
                ids=tuple(set(draw.integers(0, vocabulary, int(draw.integers(0, 4))).tolist())),
            )
            for row in range(8)
        ]
        expected = gather_logprobs(
            logits, torch.tensor(chosen), asks, lambda each: each, normalised=normalised
        )
        found = scores.gathered(logits, chosen, asks, normalised=normalised)
        for ask, wanted in zip(asks, expected, strict=True):
            mine = found[ask.row]
            if not torch.isfinite(logits[ask.row].max()):
                assert mine.ranks[0][0] == wanted.ranks[0][0]
                continue  # the best of what is no number are any
            assert mine.ids[0][: ask.count + 1] == wanted.ids[0][: ask.count + 1]
            assert set(mine.ids[0]) == set(wanted.ids[0])
            assert mine.ranks == wanted.ranks
            assert mine.num_best == wanted.num_best
            values = dict(zip(wanted.ids[0], wanted.values[0], strict=True))
            for token, value in zip(mine.ids[0], mine.values[0], strict=True):
                assert value == pytest.approx(values[token], abs=4e-6, rel=1e-6, nan_ok=True)


def batch_of(draw: np.random.Generator, rows: int, vocabulary: int) -> SamplingBatch:
    def places() -> Places:
        flat = draw.choice(rows * vocabulary, 40, replace=False)
        return Places(rows=flat // vocabulary, ids=flat % vocabulary)

    def floats(*options: float) -> np.ndarray:
        return draw.choice(options, 40).astype(np.float32)

    penalties = Penalties(
        places=places(), counts=floats(0, 1, 2, 7), repetition=floats(1, 1.3, 0.7),
        frequency=floats(0, 0.3, -1.7), presence=floats(0, 0.9),
    )  # fmt: skip
    return SamplingBatch(
        num_rows=rows,
        banned=places(),
        bias=(places(), floats(-100, 0.1, 3)),
        penalties=penalties,
    )


def test_edits_are_those_of_the_built_in_sampler_to_the_bit_and_are_taken_back():
    reference = Sampler(HostDeviceOps())
    for seed in range(8):
        draw = np.random.default_rng(seed)
        logits = torch.from_numpy(draw.standard_normal((4, 61)).astype(np.float32))
        logits[1, 5] = torch.nan
        before = logits.clone()
        batch = batch_of(draw, 4, 61)
        assert sparse_edits.are_sparse(logits, batch)
        expected = reference.edit(logits, batch)
        with sparse_edits.edited(logits, batch) as changed:
            assert np.array_equal(
                changed.numpy().view(np.uint32)[2:], expected.numpy().view(np.uint32)[2:]
            )
            assert torch.equal(changed.nan_to_num(9), expected.nan_to_num(9))
            assert not torch.equal(changed[2:], before[2:])
        assert np.array_equal(logits.numpy().view(np.uint32), before.numpy().view(np.uint32))
        with pytest.raises(OSError, match="x"), sparse_edits.edited(logits, batch):
            raise OSError("x")
        assert np.array_equal(logits.numpy().view(np.uint32), before.numpy().view(np.uint32))


ASKED = (
    {"temperature": 0, "logprobs": 4},
    {"temperature": 0.8, "seed": 3, "logprobs": 2, "repetition_penalty": 1.4},
    {"temperature": 1.1, "seed": 4, "frequency_penalty": 0.8, "presence_penalty": 0.4},
    {"temperature": 0, "logit_bias": {7: 4.0, 9: -50.0}, "logprobs": 3},
    {"temperature": 0.9, "seed": 5, "top_p": 0.9, "min_tokens": 4, "bad_words": ["w11"]},
)  # fmt: skip


def test_a_step_with_them_runs_nothing_of_torch_over_the_vocabulary(checkpoint, monkeypatch):
    """And gives what the built-in sampler gives."""
    folder = checkpoint("llama")
    params = [SamplingParams(max_tokens=8, ignore_eos=True, **each) for each in ASKED]
    with engine(folder, "off") as llm:
        expected = llm.generate(PROMPTS, params)
    with engine(folder, "on") as llm:

        def refuse(*args, **kwargs):
            raise AssertionError("torch was asked")

        monkeypatch.setattr(Sampler, "edit", refuse)
        monkeypatch.setattr(Sampler, "sample", refuse)
        monkeypatch.setattr(scores, "gather_logprobs", refuse)
        found = llm.generate(PROMPTS, params)
    assert tokens(found) == tokens(expected)
    for mine, theirs in zip(found, expected, strict=True):
        ours, wanted = mine.outputs[0].logprobs, theirs.outputs[0].logprobs
        assert (ours is None) == (wanted is None)
        for row, other in zip(ours or (), wanted or (), strict=True):
            assert row.keys() == other.keys()
            for token, entry in row.items():
                assert entry.rank == other[token].rank
                assert entry.logprob == pytest.approx(other[token].logprob, abs=2e-4)


def test_scores_do_not_depend_on_the_other_rows():
    draw = np.random.default_rng(0)
    logits = torch.from_numpy(draw.standard_normal((5, 1003)).astype(np.float32))
    asks = [LogprobAsk(row=row, count=5, ids=(1, 2)) for row in range(5)]
    whole = scores.gathered(logits, [3] * 5, asks, normalised=True)
    for row in range(5):
        alone = scores.gathered(
            logits[row : row + 1].clone(), [3], [LogprobAsk(row=0, count=5, ids=(1, 2))],
            normalised=True,
        )  # fmt: skip
        assert alone[0] == whole[row]
