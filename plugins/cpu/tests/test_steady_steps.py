"""Steps that follow each other in the same requests are not built anew: the tokens are the same,
torch computes nothing, and little of Python runs.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter

import pytest
import torch
from attrs import evolve
from hardpoint.errors import HardpointError
from hardpoint_cpu.model_runner import CpuModelRunner
from hardpoint_cpu.native.library import availability
from hardpoint_cpu.native.program import Program
from hardpoint_cpu.steady_steps import SteadySteps
from hardpoint_engine import SamplingParams
from native_models import PROMPTS, engine, tokens
from torch.utils._python_dispatch import TorchDispatchMode

available = availability()
pytestmark = pytest.mark.skipif(not available.levels, reason=available.reason)

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
MIXED = [
    evolve(GREEDY, max_tokens=9),
    evolve(GREEDY, logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.8, seed=3, max_tokens=14, ignore_eos=True),
    evolve(GREEDY, presence_penalty=0.5, max_tokens=17),
    evolve(GREEDY, min_tokens=5),
]
MOST_OPCODES = 800
"""Of a steady step of one request at its worker; of the long way there are about 6,000."""
MOST_BETWEEN = 3_900
"""From a step's program to that of the next, at the worker and in the driver."""
MOST_FOR_EACH = 5
"""Opcodes for each further request."""


@pytest.fixture
def ran(monkeypatch):
    """The number of requests of each steady step."""
    seen = []
    run = SteadySteps.run

    def noted(self, plan):
        seen.append(len(self.ids))
        return run(self, plan)

    monkeypatch.setattr(SteadySteps, "run", noted)
    return seen


def generated(folder, native, prompts, params, **keys):
    with engine(folder, native, **keys) as llm:
        return tokens(llm.generate(prompts, params))


@pytest.mark.parametrize("params", [GREEDY, MIXED], ids=["greedy", "mixed"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_tokens_are_those_of_torch_over_many_blocks_and_as_requests_end(
    checkpoint, ran, family, params
):
    folder = checkpoint(family)
    expected = generated(folder, "off", PROMPTS, params)
    assert not ran
    assert generated(folder, "on", PROMPTS, params) == expected
    if params is GREEDY:
        assert ran == [len(PROMPTS)] * 18  # of 20, one of prompts and one that they follow
    else:
        assert {len(PROMPTS), 4, 3, 2} <= set(ran)


def test_a_request_as_long_as_the_longest_ends_as_it_does_through_torch(checkpoint, ran):
    folder, prompts = checkpoint("llama"), [PROMPTS[-1], PROMPTS[2]]
    params = evolve(GREEDY, max_tokens=100)
    found = generated(folder, "on", prompts, params, max_model_len=96)
    assert ran
    assert found == generated(folder, "off", prompts, params, max_model_len=96)


def test_requests_that_lose_their_blocks_go_on_with_the_same_tokens(checkpoint, ran):
    folder, few = checkpoint("llama"), {"num_kv_blocks": 28, "max_model_len": 64}
    prompts = [each[:30] for each in PROMPTS] * 2
    expected = generated(folder, "on", prompts, GREEDY)
    ran.clear()
    assert generated(folder, "on", prompts, GREEDY, **few) == expected
    assert ran


@pytest.mark.parametrize(
    "params", [GREEDY, MIXED[2], evolve(GREEDY, min_tokens=20)], ids=["greedy", "drawn", "least"]
)
def test_no_step_has_torch_compute_anything(checkpoint, monkeypatch, params):
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    execute = CpuModelRunner.execute_model

    def watched(self, plan):
        with Seen():
            torch.ones(())  # so that it is seen to see
            return execute(self, plan)

    with engine(checkpoint("llama"), "on") as llm:
        llm.generate(PROMPTS[:2], params)
        monkeypatch.setattr(CpuModelRunner, "execute_model", watched)
        llm.generate([each[::-1] for each in PROMPTS[2:4]], params)
    assert len(seen) >= 14
    assert set(seen) == {"aten.ones.default"}


def opcodes_run(function, *args):
    """Return what ``function`` gives, and how many opcodes ran."""
    count = 0

    def each(frame, event, arg):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return each

    before = sys.gettrace()
    sys.settrace(each)
    try:
        return function(*args), count
    finally:
        sys.settrace(before)


def test_little_of_python_runs_in_a_step(checkpoint, monkeypatch):
    execute, found = CpuModelRunner.execute_model, []

    def counted(self, plan):
        output, count = opcodes_run(execute, self, plan)
        found.append((len(plan.num_tokens), count))
        return output

    monkeypatch.setattr(CpuModelRunner, "execute_model", counted)
    with engine(checkpoint("llama"), "on", block_size=32) as llm:
        for batch in (1, 16):
            prompts = [[3 + i, 7, 9] for i in range(batch)]
            llm.generate(prompts, evolve(GREEDY, min_tokens=20))
    one = sorted(count for batch, count in found if batch == 1)
    many = sorted(count for batch, count in found if batch == 16)
    assert one[len(one) // 2] < MOST_OPCODES
    assert many[len(many) // 2] < MOST_OPCODES + 15 * MOST_FOR_EACH
    assert one[-1] > MOST_OPCODES  # of the prompt


@pytest.fixture
def opcodes(monkeypatch):
    """How many opcodes ran until now on each thread of an engine that starts now."""
    found = Counter()

    def each(frame, event, arg):
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            found[threading.current_thread().name] += 1
        return each

    before = threading.gettrace()
    threading.settrace(each)
    yield found
    threading.settrace(before)


def test_little_of_python_runs_between_two_steps(checkpoint, monkeypatch, opcodes):
    """From the end of a step's program to the beginning of the next, on both threads; what the
    driver does while a program runs is not counted.
    """
    compute, ends, between = Program.compute, [], []

    def noted(self, *args):
        if ends:
            between.append(opcodes.total() - ends[-1])
        compute(self, *args)
        time.sleep(0.02)  # as long as that of a larger model
        ends.append(opcodes.total())

    monkeypatch.setattr(Program, "compute", noted)
    with engine(checkpoint("llama"), "on", block_size=32) as llm:
        llm.generate([[3, 7, 9]], evolve(GREEDY, min_tokens=20))
    assert sorted(between)[len(between) // 2] < MOST_BETWEEN
    assert max(between) > MOST_BETWEEN  # of the step that follows the prompt's


def change_head(worker):
    """Give the head another tensor of other numbers."""
    model = worker.get_model_runner().get_model()
    name, held = next((n, p) for n, p in model.named_parameters() if p.ndim == 1)
    path, _, last = name.rpartition(".")
    with torch.no_grad():
        flipped = torch.nn.Parameter(held.flip(0).clone(), requires_grad=False)
    setattr(model.get_submodule(path), last, flipped)


def hook_norm(worker):
    """Double what the first norm gives."""
    model = worker.get_model_runner().get_model()
    module = next(m for m in model.modules() if type(m).__name__.endswith("Norm"))
    module.register_forward_hook(lambda _module, _args, out: out * 2)


@pytest.mark.parametrize("change", [change_head, hook_norm])
def test_what_a_call_between_two_steps_changes_counts_from_the_next(checkpoint, ran, change):
    found = {}
    for native in ("off", "on"):
        with engine(checkpoint("llama"), native) as llm:
            stream = llm.stream(PROMPTS[2], GREEDY)
            for _ in range(8):
                next(stream)
            before = len(ran)
            llm.collective_rpc(change)
            *_, last = stream
            found[native] = list(last.outputs[0].token_ids)
    assert before > 3
    assert found["on"] == found["off"]


def test_a_token_without_numbers_ends_its_request_and_no_other(checkpoint, ran):
    folder = checkpoint("mistral")
    clean = generated(folder, "on", PROMPTS[:3], GREEDY)
    spoilt = next(
        token for token in clean[0][5:] if all(token not in (*p, *c) for p, c in zip(
            PROMPTS[1:3], clean[1:], strict=True)) and token not in PROMPTS[0]
    )  # fmt: skip

    def spoil(worker):
        with torch.no_grad():
            model = worker.get_model_runner().get_model()
            next(p for p in model.parameters() if p.shape[0] == 97)[spoilt] = torch.nan

    with engine(folder, "on") as llm:
        llm.collective_rpc(spoil)
        ran.clear()
        streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:3]]
        with pytest.raises(HardpointError, match="no numbers for request"):
            list(streams[0])
        for stream, expected in zip(streams[1:], clean[1:], strict=True):
            *_, last = stream
            assert list(last.outputs[0].token_ids) == expected
    assert 3 in ran


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_computed", (40,)), ("num_output", (30,)), ("new_blocks", ((tuple(range(40)),),))],
)
def test_a_plan_that_does_not_follow_is_refused_as_ever(checkpoint, ran, field, value):
    with engine(checkpoint("llama"), "on") as llm:
        execute, plans = llm.executor.execute_model, []

        def changed(plan, non_block=False):
            plans.append(plan)
            if len(plans) == 8:
                plan = evolve(plan, running=evolve(plan.running, **{field: value}))
            return execute(plan, non_block=non_block)

        llm.executor.execute_model = changed
        with pytest.raises(HardpointError) as raised:
            llm.generate([PROMPTS[2]], GREEDY)
        assert isinstance(raised.value.__cause__ or raised.value, HardpointError)
        assert "contradict" in str(raised.value) or "request" in str(raised.value)
        assert len(ran) == 5  # the first is of the prompt, the second built, the eighth refused
        del llm.executor.execute_model
        assert len(tokens(llm.generate([PROMPTS[2]], GREEDY))[0]) == 20
