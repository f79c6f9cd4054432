"""A node that goes while a step is on its way through a compiled graph that spans it."""

from __future__ import annotations

import pytest
from hardpoint.errors import WorkerDiedError
from hardpoint.messages import SchedulerOutput

pytestmark = pytest.mark.slow


def test_a_node_that_is_removed_during_a_step_fails_the_group(launcher, give_cache, nodes):
    executor = launcher.start(
        workers=3,
        executor="ray_legacy",
        **{
            "block_size": 4,
            "max_model_len": 64,
            "plugins.ray.address": nodes.address,
            "plugins.ray.strategy": "SPREAD",
            "plugins.dummy.step_seconds": 600.0,
        },
    )
    actors = executor._resources.nursery._actors
    far = [rank for rank, each in actors.items() if each.pidfd == -1]
    assert far
    give_cache(executor)
    step = executor.execute_model(SchedulerOutput(step_id=1), non_block=True)
    assert nodes.remove() == "removed"
    error = step.exception(60)
    assert isinstance(error, WorkerDiedError)
    assert error.rank in far
    assert error.__cause__ is not None
