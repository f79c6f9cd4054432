"""Tokens that the native library chooses beside those of the built-in sampler: the same ids, for
any mixture of rows.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from attrs import evolve
from hardpoint_cpu.native import library
from hardpoint_cpu.native import sampler as native_sampler
from hardpoint_cpu.native.library import availability
from hardpoint_cpu.native.program import Program
from hardpoint_cpu.native.sampler import ProgramSampler
from hardpoint_engine import SamplingParams
from hardpoint_runtime.device import HostDeviceOps
from hardpoint_runtime.sampling.batch import Draws, SamplingBatch
from hardpoint_runtime.sampling.logprobs import LogprobAsk
from hardpoint_runtime.sampling.sampler import Sampler
from native_models import PROMPTS, engine, tokens

available = availability()
pytestmark = pytest.mark.skipif(not available.levels, reason=available.reason)

TURNS, ROWS = 12, 24


class Chooser:
    """A program without a model, whose team chooses."""

    best = None
    choose = Program.choose

    def __init__(self) -> None:
        self._library = library.load()
        columns = (ctypes.c_int64 * 1)(1)
        shape = library.Shape(1, 1, 1, 1, 1, 1, 1, 1, 8, 0, 1, columns)
        made = self._library.hp_program_new(0, 2, None, 0, ctypes.byref(shape))
        assert made
        self._handle = ctypes.c_void_p(made)


class Runner:
    """What of a runner the sampler sees."""

    graphs = None

    def __init__(self) -> None:
        self.program = Chooser()


@pytest.fixture(scope="module")
def runner():
    """Lend a runner whose program chooses."""
    lent = Runner()
    yield lent
    library.load().hp_program_free(lent.program._handle)


def batch_of(draw: np.random.Generator, rows: np.ndarray, vocabulary: int) -> Draws:
    count = len(rows)
    some = {
        "min_p": draw.choice([0, 0, 0.02, 0.3], count).astype(np.float32),
        "top_k": draw.choice([0, 0, 1, 3, 50, vocabulary - 1], count),
        "top_p": draw.choice([1, 1, 0.99, 0.9, 0.5, 0.1], count).astype(np.float32),
    }
    if draw.random() < 0.3:
        some["top_k"] = some["top_p"] = None
    return Draws(
        rows=rows,
        temperature=draw.choice([0.3, 0.8, 1.0, 1.7], count).astype(np.float32),
        keys=draw.integers(-(2**62), 2**62, count),
        **some,
    )


def test_choices_are_those_of_the_built_in_sampler(runner):
    draw = np.random.default_rng(7)
    reference = Sampler(HostDeviceOps())
    ours = ProgramSampler(runner, Sampler(HostDeviceOps()))
    for turn in range(TURNS):
        vocabulary = (97, 1000, 4099, 20000)[turn % 4]
        numbers = draw.standard_normal((ROWS, vocabulary)) * draw.choice([0.5, 2, 6])
        logits = torch.from_numpy(numbers.astype(np.float32))
        if turn % 3 == 0:
            logits = logits.to(torch.bfloat16).float()  # many are equal
        logits[3] = -torch.inf
        logits[4, 5] = torch.nan
        logits[5, 7] = torch.inf
        logits[6, 2:] = -torch.inf
        drawn = np.flatnonzero(draw.random(ROWS) < 0.8)
        asks = tuple(LogprobAsk(row=row, count=2) for row in range(0, ROWS, 7))
        batch = SamplingBatch(num_rows=ROWS, draws=batch_of(draw, drawn, vocabulary), logprobs=asks)
        expected, found = reference.sample(logits, batch), ours.sample(logits, batch)
        assert found.tokens == expected.tokens
        assert found.nan_counts == expected.nan_counts
        assert found.logprobs.keys() == expected.logprobs.keys()
        for row, wanted in expected.logprobs.items():
            scored = found.logprobs[row]
            assert (scored.ids, scored.ranks) == (wanted.ids, wanted.ranks)
            assert scored.values[0] == pytest.approx(wanted.values[0], abs=4e-6, rel=1e-6)
        assert found.nan_counts == {3: 0, 4: 1, 5: 1}


def test_what_rounding_could_change_is_left_to_the_built_in_sampler(runner, monkeypatch):
    """Of tokens that are all alike, the last that top-p keeps is at the very edge of the cut."""
    asked = []
    wishes_of = native_sampler._some
    monkeypatch.setattr(
        native_sampler, "_some", lambda draws, at: asked.append(len(at)) or wishes_of(draws, at)
    )
    draw = np.random.default_rng(1)
    count = 400
    logits = torch.zeros((count, 8))
    alike = Draws(
        rows=np.arange(count),
        temperature=np.ones(count, np.float32),
        keys=draw.integers(-(2**62), 2**62, count),
        top_k=np.zeros(count, np.int64),
        top_p=np.full(count, 0.5, np.float32),
    )
    batch = SamplingBatch(num_rows=count, draws=alike)
    ours = ProgramSampler(runner, Sampler(HostDeviceOps()))
    assert (
        ours.sample(logits, batch).tokens == Sampler(HostDeviceOps()).sample(logits, batch).tokens
    )
    assert 0 < sum(asked) < count / 2
    asked.clear()
    ours.sample(logits, evolve(batch, draws=evolve(alike, top_p=np.full(count, 0.55, np.float32))))
    assert asked == []


def test_draws_of_an_engine_are_those_of_torch(checkpoint):
    folder = checkpoint("llama")
    ways = (
        {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {},
        {"top_p": 0.9, "repetition_penalty": 1.3},
    )  # fmt: skip
    drawn = [
        SamplingParams(temperature=0.9, seed=n, max_tokens=10, ignore_eos=True, **way)
        for n, way in enumerate(ways)
    ]
    found = {}
    for native in ("off", "on"):
        with engine(folder, native) as llm:
            found[native] = tokens(llm.generate(PROMPTS, drawn))
    assert found["on"] == found["off"]


def test_greedy_steps_write_no_logits(checkpoint):
    """Until somebody wants them: then they are those of the step."""

    def spoil(worker):
        with torch.inference_mode():
            worker.model_runner.program.logits.fill_(torch.nan)

    def untouched(worker):
        return bool(worker.model_runner.program.logits.isnan().all())

    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    penal = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, presence_penalty=1.5)
    folder = checkpoint("llama")
    with engine(folder, "off") as llm:
        expected, punished = (tokens(llm.generate(PROMPTS, each)) for each in (greedy, penal))
    with engine(folder, "on") as llm:
        llm.collective_rpc(spoil)
        assert tokens(llm.generate(PROMPTS, greedy)) == expected
        assert llm.collective_rpc(untouched) == [True]
        mixed = tokens(llm.generate(PROMPTS * 2, [greedy] * 5 + [penal] * 5))
        assert mixed == expected + punished
        assert llm.collective_rpc(untouched) == [False]
