"""What an accelerator's memory is used for, by the exact figures of the device that enforces order.
Collected by ``ordered_fake/test_ordered_runner.py`` only.
"""

from __future__ import annotations

import gc

import pytest
import torch


@pytest.mark.parametrize("mode", ["none", "piecewise", "full", "full_and_piecewise"])
def test_a_cache_of_all_that_is_left_leaves_the_budget_unbroken(
    mode, make_accelerator, make_driver, plan_for
):
    """With graphs captured, and in the largest step, nothing is used beyond the budget."""
    worker = make_accelerator(ready=False, mode=mode, sizes=(1, 2, 4, 8, 16))
    worker.budget = worker.port.memory_held() + (32 << 20)
    available = worker.determine_available_memory()
    graphs = worker.memory_profile.graphs
    assert (graphs > 0) == (mode != "none")
    specs = worker.get_kv_cache_spec()
    blocks = available // sum(spec.page_bytes for spec in specs.values())
    assert blocks > 100
    worker.initialize_from_config(plan_for(specs, blocks))
    worker.port.empty_cache()
    worker.compile_or_warm_up_model()
    runner = worker.model_runner
    if mode != "none":
        taken = runner.graphs.report.num_bytes
        assert graphs / 4 <= taken <= graphs  # here graphs share less than on a real device
    driver = make_driver(runner, num_blocks=blocks)
    for name in "abcd":
        driver.add(name, [1, 2, 3, 4, 5, 6])
    driver.step(dict.fromkeys("abcd", 6))
    driver.run(4)
    assert worker.port.memory_held() <= worker.budget


def test_graphs_that_take_more_than_was_set_aside_are_told(make_accelerator, plan_for, caplog):
    worker = make_accelerator(ready=False, mode="full")
    worker.determine_available_memory()
    worker.model_runner.graph_memory = 1
    worker.initialize_from_config(plan_for(worker.get_kv_cache_spec(), 20))
    worker.compile_or_warm_up_model()
    assert "bytes of the 1 that were set aside for them" in caplog.text


@pytest.mark.parametrize("others", [False, True])
def test_libraries_give_their_work_space_back_unless_graphs_live(
    others, make_accelerator, monkeypatch
):
    """Of the graphs that are captured to measure, none is left that uses it."""
    worker, asked = make_accelerator(ready=False, mode="full"), []
    port = worker.port
    gc.collect()  # graphs of earlier tests
    x = torch.ones(1, device=port.device)
    held = [port.capture(lambda: x + 1, "of another engine")] if others else []
    monkeypatch.setattr(type(port), "release_workspaces", lambda self: asked.append("release"))
    emptied = type(port).empty_cache
    monkeypatch.setattr(
        type(port), "empty_cache", lambda self: (asked.append("empty"), emptied(self))
    )
    assert worker.model_runner.profile_graphs() > 0
    assert asked == [*([] if held else ["release"]), "empty"]


def test_what_torch_keeps_of_an_earlier_engine_is_free_for_the_next(make_accelerator):
    worker = make_accelerator(ready=False)
    port = worker.port
    port.empty_cache()
    free = port.memory_info().free
    earlier = torch.zeros(1 << 20, device=port.device)
    del earlier
    assert port.memory_info().free < free
    worker._budget(port)
    assert worker.baseline.free == free
