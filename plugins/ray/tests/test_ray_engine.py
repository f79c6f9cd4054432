"""Models over actors of two nodes: the tokens of one worker."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def _small_engine():
    path = Path(__file__).parents[3] / "tests" / "parallel" / "small_engine.py"
    spec = importlib.util.spec_from_file_location("ray_small_engine", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


small_engine = _small_engine()


@pytest.fixture(scope="module")
def expected():
    with small_engine.start(executor="uni") as llm:
        return small_engine.answers(llm)


SHAPES = [
    (3, 1, "SPREAD"),
    (1, 2, "STRICT_SPREAD"),
    (3, 1, "STRICT_PACK"),
    (1, 2, "STRICT_PACK"),
    (2, 2, "SPREAD"),
]
QUICK = [("ray", 3, 1, "SPREAD")]


@pytest.mark.parametrize(
    ("executor", "tensor", "pipeline", "strategy"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow)
        for each in [(name, *shape) for name in ("ray", "ray_legacy") for shape in SHAPES]
    ],
)
def test_the_tokens_are_those_of_one_worker(nodes, expected, executor, tensor, pipeline, strategy):
    keys = {"plugins.ray.address": nodes.address, "plugins.ray.strategy": strategy}
    with small_engine.start(
        executor=executor, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, **keys
    ) as llm:
        actors = llm.executor._resources.nursery._actors.values()
        assert len({each.where.node_id for each in actors}) == (1 if "PACK" in strategy else 2)
        found = small_engine.answers(llm)
        graph = getattr(llm.executor, "graph", None)
        assert (graph is not None and graph.steps > 50) == (executor == "ray_legacy")
    assert found["tokens"] == expected["tokens"]
    for row, wanted in zip(found["logprobs"], expected["logprobs"], strict=True):
        assert row == pytest.approx(wanted, abs=1e-4)
