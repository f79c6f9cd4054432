"""Memory, models and metadata that moved since graphs were captured; graphs half made, and given
back.
"""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from attrs import evolve
from hardpoint.config.schema import GraphConfig
from hardpoint.errors import LifecycleError
from hardpoint.records import Offer
from hardpoint_runtime import forward_context
from hardpoint_runtime.attention import paged
from hardpoint_runtime.graphs.dummy_batches import dummy_batch
from hardpoint_runtime.graphs.errors import GraphBufferError
from hardpoint_runtime.graphs.resolution import AttentionSupport
from hardpoint_runtime.graphs.steps import METADATA_BUFFERS
from hardpoint_runtime.graphs.support import graph_support

LAYERS = 2


@pytest.fixture(params=["full", "piecewise"])
def replayed(request, make_graphs, make_driver):
    """A runner whose graphs ran once, and a step that would replay again."""
    runner = make_graphs(request.param, sizes=(4,))
    driver = make_driver(runner)
    driver.add("a", [1, 2, 3])
    driver.step({"a": 3})
    return runner, driver


def test_another_kv_cache_is_a_named_error(replayed):
    runner, driver = replayed
    layer = next(iter(runner.kv_cache.layers))
    cache = runner.kv_cache.layers[layer]
    runner.kv_cache.layers[layer] = evolve(cache, value=cache.value.clone())
    with pytest.raises(GraphBufferError, match=f"the value cache of {layer} is at 0x"):
        driver.step({"a": 1})


def test_another_weight_is_a_named_error(replayed):
    runner, driver = replayed
    norm = runner.model.layers[1].input_norm
    norm.weight = torch.nn.Parameter(norm.weight.clone(), requires_grad=False)
    with pytest.raises(GraphBufferError, match=r"weight layers\.1\.input_norm\.weight is at 0x"):
        driver.step({"a": 1})


def test_a_weight_with_other_memory_is_a_named_error(replayed):
    runner, driver = replayed
    runner.model.embed.weight.data = runner.model.embed.weight.data.clone()
    with pytest.raises(GraphBufferError, match="weight embed"):
        driver.step({"a": 1})


def test_another_module_is_a_named_error(replayed):
    runner, driver = replayed
    layer = runner.model.layers[1]
    old, layer.input_norm = layer.input_norm, copy.copy(layer.input_norm)
    with pytest.raises(GraphBufferError, match=r"^module layers\.1\.input_norm is another one"):
        driver.step({"a": 1})
    layer.input_norm = old
    runner.model.added = torch.nn.Identity()
    with pytest.raises(GraphBufferError, match=r"^module added is another one"):
        driver.step({"a": 1})


def test_another_model_is_a_named_error_until_it_is_warmed_up(replayed, make_runner, make_driver):
    """Loaded anew, a model has other memory, whatever was captured of the old one."""
    runner, driver = replayed
    runner.load_model()
    with torch.inference_mode():
        runner.model.norm.weight.fill_(0)
    plan = driver.plan({"a": 1})
    with pytest.raises(GraphBufferError, match="the model is another one than graphs were"):
        runner.execute_model(plan)
    runner.warm_up()
    output = runner.execute_model(evolve(plan, step_id=plan.step_id + 1))
    assert output.tokens == ((0,),)
    assert output.graph_stats.mode != "NONE"


@pytest.mark.parametrize("name", METADATA_BUFFERS)
def test_metadata_elsewhere_is_a_named_error(name, make_graphs, make_driver):
    runner = make_graphs("full", sizes=(4,))
    build = runner.build_attention

    def elsewhere(inputs, batch=None):
        found = next(iter(build(inputs, batch).values()))
        moved = evolve(found, **{name: getattr(found, name).clone()})
        return dict.fromkeys(runner.kv_cache.layers, moved)

    runner.build_attention = elsewhere
    driver = make_driver(runner)
    driver.add("a", [1, 2, 3])
    layer = next(iter(runner.kv_cache.layers))
    with pytest.raises(GraphBufferError, match=rf"{name} in the attention metadata of {layer} is"):
        driver.step({"a": 3})


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_a_capture_that_fails_leaves_eager_steps(mode, make_runner, make_driver):
    """No graph of a half-made set is replayed, and all can be made later."""
    graph = GraphConfig(graph_mode=mode, graph_sizes=(2, 4), graph_warm_ups=0)
    runner = make_runner(graph=graph, max_num_seqs=4)
    capture, made = runner.device.capture, []

    def failing(*args, **more):
        made.append(capture(*args, **more))
        if len(made) == (2 if mode == "full" else 2 + LAYERS):
            raise ZeroDivisionError
        return made[-1]

    runner.device.capture = failing
    with pytest.raises(ZeroDivisionError):
        runner.warm_up()
    assert runner.graphs is None
    driver = make_driver(runner)
    driver.add("a", [1, 2, 3])
    assert driver.step({"a": 3}).graph_stats is None
    runner.device.capture = capture
    runner.warm_up()
    assert driver.step({"a": 1}).graph_stats.padded == 2


def test_a_step_after_one_that_failed_in_a_replay_is_as_ever(replayed, make_runner, make_driver):
    runner, driver = replayed
    replay, plan = runner.device.replay, driver.plan({"a": 1})

    def failing(graph):
        replay(graph)
        raise ZeroDivisionError

    runner.device.replay = failing
    with pytest.raises(ZeroDivisionError):
        runner.execute_model(plan)
    runner.device.replay = replay
    driver.take(plan, runner.execute_model(evolve(plan, step_id=plan.step_id + 1)))
    driver.step_id += 1
    driver.run(5)
    alone = make_driver(make_runner())
    alone.add("a", [1, 2, 3])
    alone.run(5)
    assert driver.output("a") == alone.output("a")


def test_weights_changed_in_place_are_used(replayed):
    runner, driver = replayed
    before = driver.step({"a": 1}).tokens
    with torch.inference_mode():
        runner.model.norm.weight.fill_(0)
    after = driver.step({"a": 1}).tokens
    assert after == ((0,),)
    assert before != after


def test_other_inputs_than_the_static_buffers_are_a_named_error(replayed):
    runner, _ = replayed
    model = next(iter(runner.graphs.captured._graphs.values()))
    batch = model.batch
    with torch.inference_mode():
        step = runner.make_forward_context(dummy_inputs(model.capture), batch)
    for given in (
        (batch.token_ids.clone(), batch.positions),
        (batch.token_ids, batch.positions.clone()),
    ):
        with pytest.raises(GraphBufferError, match=r"is another tensor than the static buffer"):
            model(*given, step)


def dummy_inputs(capture):
    return dummy_batch(capture, uniform_query=1, most_rows=4, longest=64, block_sizes=(4,))


def test_a_graph_is_not_replayed_before_all_are_captured(make_runner):
    runner = make_runner(graph=GraphConfig(graph_mode="full", graph_sizes=(4,)), max_num_seqs=4)
    graphs = runner.make_graphs(runner.graph_plan)
    with pytest.raises(LifecycleError, match="before all were captured"):
        graphs.replay(None, None, None)


def test_a_longer_longest_length_than_captured_is_refused(make_graphs):
    runner = make_graphs("full", sizes=(2,))
    runner.update_max_model_len(100)
    with pytest.raises(LifecycleError, match="graphs were captured for at most 256 tokens"):
        runner.update_max_model_len(300)


def test_closing_gives_the_graphs_back(make_graphs):
    runner = make_graphs("full_and_piecewise", sizes=(2, 4))
    graphs = runner.graphs
    blocks = [*graphs._scratch.blocks, *getattr(graphs._pool, "blocks", ())]
    held = [weakref.ref(each) for each in (*blocks, *graphs.captured._graphs.values())]
    held += [weakref.ref(graphs), weakref.ref(runner.model)]
    del blocks
    assert len(held) > 4
    del graphs
    runner.close()
    assert runner.graphs is None
    gc.collect()
    assert [each() for each in held] == [None] * len(held)


# Scratch memory.


def needs_scratch(query, key_cache, value_cache, metadata, *, scale, **options):
    if query.shape[0] > 16:
        workspace = forward_context.current().workspace
        workspace.views((query.shape, query.dtype))
    return paged.attention(query, key_cache, value_cache, metadata, scale=scale, **options)


@pytest.mark.parametrize("profiled", [True, False])
@pytest.mark.parametrize("mode", ["none", "piecewise"])
def test_scratch_memory_of_large_steps_only_is_there(
    mode, profiled, registry, make_runner, make_driver
):
    offer = Offer(name="attention", platform="host", reference=f"{__name__}:needs_scratch")
    registry.given["hardpoint_operations"] = [offer]
    graph = GraphConfig(graph_mode=mode, graph_sizes=(4,))
    runner = make_runner(registry=registry, graph=graph, max_num_seqs=4)
    if profiled:
        runner.profile_run()
    runner.warm_up()
    assert runner.workspace.num_bytes == 64 * 4 * 8 * 4
    driver = make_driver(runner)
    driver.add("a", [1] * 60)
    driver.step({"a": 60})


NEEDED = {"bytes": 8}


def needs_what_is_needed(query, key_cache, value_cache, metadata, *, scale, **options):
    forward_context.current().workspace.views(((NEEDED["bytes"],), torch.uint8))
    return paged.attention(query, key_cache, value_cache, metadata, scale=scale, **options)


@pytest.mark.parametrize("mode", ["none", "piecewise"])
def test_scratch_memory_may_grow_in_another_warm_up(mode, registry, make_runner, monkeypatch):
    offer = Offer(name="attention", platform="host", reference=f"{__name__}:needs_what_is_needed")
    registry.given["hardpoint_operations"] = [offer]
    graph = GraphConfig(graph_mode=mode, graph_sizes=(4,))
    runner = make_runner(registry=registry, graph=graph, max_num_seqs=4)
    runner.warm_up()
    monkeypatch.setitem(NEEDED, "bytes", 8000)
    runner.warm_up()
    assert (runner.workspace.num_bytes, runner.workspace.locked) == (8000, True)


@graph_support(AttentionSupport.ALWAYS)
def needs_more_when_fixed(query, key_cache, value_cache, metadata, *, scale, **options):
    rows = query.shape[0] * (10 if metadata.fixed else 1)
    (view,) = forward_context.current().workspace.views(((rows, 8), torch.float32))
    view.fill_(1)
    return paged.attention(query, key_cache, value_cache, metadata, scale=scale, **options)


@pytest.mark.parametrize("warm_ups", [0, 1])
@pytest.mark.parametrize("mode", ["full", "full_and_piecewise"])
def test_scratch_memory_moves_no_more_once_graphs_are_made(
    mode, warm_ups, registry, make_runner, make_driver
):
    """Neither within a capture nor between two: the first would have the old memory."""
    offer = Offer(name="attention", platform="host", reference=f"{__name__}:needs_more_when_fixed")
    registry.given["hardpoint_operations"] = [offer]
    graph = GraphConfig(graph_mode=mode, graph_sizes=(4, 8), graph_warm_ups=warm_ups)
    runner = make_runner(registry=registry, graph=graph, max_num_seqs=4, max_num_batched_tokens=8)
    held = []
    capture = runner.device.capture

    def watching(*args, **more):
        held.append((runner.workspace.num_bytes, runner.workspace.locked))
        return capture(*args, **more)

    runner.device.capture = watching
    runner.warm_up()
    assert set(held) == {(runner.workspace.num_bytes, True)}
    driver = make_driver(runner)
    driver.add("a", [1] * 7)
    driver.run(5)
