"""What steps run in where nobody sets ``graph_mode``: what the device's port says. Collected by
``tests/gpus/test_gpu_runners.py``, with the classes of each platform.
"""

from __future__ import annotations

from hardpoint_runtime.graphs.modes import GraphMode

SIZES = (1, 2, 4, 16)


def outputs(make_driver, worker):
    """Return what requests of several lengths get, in steps of prompts, of both, and of decodes."""
    driver = make_driver(worker.model_runner, num_blocks=60)
    driver.add("a", [5, 6, 7, 8, 9])
    driver.step({"a": 5})
    driver.add("b", [3, 1])
    driver.add("c", [4])
    return driver.run(5)


def test_the_default_of_the_device_is_made_and_replayed(make_accelerator, make_driver):
    worker = make_accelerator(mode=None, sizes=SIZES)
    runner, default = worker.model_runner, GraphMode.named(type(worker.port).default_graph_mode)
    assert runner.graph_plan.mode is default
    assert outputs(make_driver, worker) == outputs(make_driver, make_accelerator())
    if default is GraphMode.NONE:
        assert runner.graphs is None
        return
    steps = {mode.name: count for mode, count in runner.graphs.counts.steps.items()}
    assert steps["FULL"] >= 4
    assert steps["PIECEWISE"] >= 1


def test_memory_for_the_default_is_set_aside_before_the_cache(make_accelerator):
    worker = make_accelerator(mode=None, sizes=SIZES, ready=False)
    without = make_accelerator(ready=False)
    worker.determine_available_memory()
    without.determine_available_memory()
    assert without.memory_profile.graphs == 0
    has = type(worker.port).default_graph_mode != "none"
    assert (worker.memory_profile.graphs > 0) is has


def test_an_explicit_none_is_none(make_accelerator):
    worker = make_accelerator()
    assert worker.model_runner.graph_plan.mode is GraphMode.NONE
    assert worker.model_runner.graphs is None
