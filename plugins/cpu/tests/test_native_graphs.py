"""A native program is the cpu's graph: `graph_mode` chooses it, the statistics count its steps."""

from __future__ import annotations

import logging

import pytest
from hardpoint.errors import HardpointError
from hardpoint_cpu.native.library import availability
from hardpoint_engine import PoolingParams, SamplingParams
from native_models import PROMPTS, engine, program_threads, tokens

available = availability()
pytestmark = pytest.mark.skipif(not available.levels, reason=available.reason)

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def counts(llm) -> dict[str, int]:
    """How many steps ran in each mode, as the worker counted."""

    def ask(worker):
        graphs = worker.model_runner.graphs
        counted = {} if graphs is None else graphs.counts.steps
        return {mode.name: steps for mode, steps in counted.items()}

    return llm.collective_rpc(ask)[0]


@pytest.mark.parametrize("mode", [None, "full"])
def test_a_program_is_the_full_graph_of_steps_of_any_shape(checkpoint, mode):
    with engine(checkpoint("llama"), "off") as llm:
        expected = tokens(llm.generate(PROMPTS, GREEDY))
        assert counts(llm) == {}
    with engine(checkpoint("llama"), "auto", graph_mode=mode) as llm:
        assert program_threads(llm)
        assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
        assert counts(llm) == {"FULL": 6}
        reported = llm.metrics.graphs
        assert reported.modes == {"FULL": 6}
        assert reported.pads == 0


def test_steps_through_torch_are_counted_as_such(checkpoint):
    with engine(checkpoint("llama"), "on") as llm:
        llm.embed(PROMPTS[:1], PoolingParams())
        assert counts(llm) == {"NONE": 1}
        llm.generate(PROMPTS[:1], GREEDY)
        assert counts(llm) == {"NONE": 1, "FULL": 6}


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"graph_mode": "none"}, "graph_mode = 'none'"),
        ({"graph_mode": "piecewise"}, "graph_mode = 'piecewise', and a program is a full graph"),
        ({"graph_mode": "full", "graph_sizes": [1, 2]}, "graph_sizes is set"),
    ],
)
def test_what_asks_for_other_graphs_gets_them_and_the_log_says_why(
    checkpoint, keys, reason, caplog
):
    folder = checkpoint("llama")
    with engine(folder, "off") as llm:
        expected = tokens(llm.generate(PROMPTS[:1], GREEDY))
    with caplog.at_level(logging.INFO), engine(folder, "auto", max_num_seqs=2, **keys) as llm:
        assert program_threads(llm) is None
        assert tokens(llm.generate(PROMPTS[:1], GREEDY)) == expected
    said = [each for each in caplog.records if "through torch instead" in each.message]
    assert len(said) == 1
    assert reason in said[0].message
    asked_for = "none" in keys.values()
    assert said[0].levelno == (logging.INFO if asked_for else logging.WARNING)
    with pytest.raises(HardpointError, match=r"native = 'on'.*graph_"):
        engine(folder, "on", **keys).close()


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("qwen2-moe", {"tensor_parallel_size": 2}),
        pytest.param(
            "gemma2",
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param("biases", {"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_shards_and_stages_have_programs_of_their_own(checkpoint, family, ranks):
    drawn = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=6, ignore_eos=True)
    found = {}
    for native, keys in (("off", {}), ("on", {"executor": "mp", **ranks})):
        with engine(checkpoint(family), native, **keys) as llm:
            found[native] = [tokens(llm.generate(PROMPTS, each)) for each in (GREEDY, drawn)]
            steps = llm.collective_rpc(
                lambda worker: (
                    worker.model_runner.graphs
                    and {mode.name for mode in worker.model_runner.graphs.counts.steps}
                )
            )
    assert found["on"] == found["off"]
    assert steps == [{"FULL"}] * len(steps)
