"""Workers of accelerators that sleep: what is freed, what is kept, and that addresses stay, so that
graphs captured before are good afterwards.
"""

from __future__ import annotations

import pytest
import torch
from hardpoint.checkpoints import read_description
from hardpoint.errors import UnsupportedError
from hardpoint_runtime.accelerator.placed_pools import PlacedPools
from hardpoint_runtime.accelerator.pools import AddressKeepingPools
from hardpoint_runtime.model_runner import TorchModelRunner

MODES = ["none", "full_and_piecewise"]
TAGS = ("weights", "kv_cache")


def run(make_driver, worker, steps=5):
    driver = make_driver(worker.model_runner, num_blocks=60)
    driver.add("a", [5, 6, 7, 8, 9])
    driver.add("b", [3])
    driver.run(steps)
    found = driver.output("a"), driver.output("b")
    for name in ("a", "b"):
        driver.finish(name)
    driver.step({})
    return found


def addresses(worker):
    runner = worker.model_runner
    tensors = [*runner.get_model().parameters(), *runner.get_model().buffers()]
    for cache in runner.kv_cache.layers.values():
        tensors += [cache.key, cache.value]
    return [tensor.data_ptr() for tensor in tensors]


def weights(worker):
    device = worker.port
    return [device.to_host(each).clone() for each in worker.get_model().parameters()]


@pytest.mark.parametrize("mode", MODES)
def test_level_1_brings_everything_back_where_it_was(mode, make_accelerator, make_driver):
    worker = make_accelerator(mode=mode)
    before, places, values = run(make_driver, worker), addresses(worker), weights(worker)
    pools, num_bytes = worker.port.pools, sum(each.nbytes for each in values)
    held = pools.held(TAGS)
    assert held >= num_bytes
    report = worker.sleep(1)
    assert report.bytes_freed >= held
    assert pools.held() == report.bytes_still_held == 0
    assert num_bytes <= report.bytes_backed_up <= held
    report = worker.wake_up(TAGS)
    assert report.bytes_still_held >= held
    assert addresses(worker) == places
    for one, other in zip(weights(worker), values, strict=True):
        assert torch.equal(one, other)
    assert run(make_driver, worker) == before
    if mode != "none":
        assert sum(worker.model_runner.graphs.counts.steps.values()) > 0


@pytest.mark.parametrize("mode", MODES)
def test_level_2_drops_the_weights_until_they_are_loaded_again(mode, make_accelerator, make_driver):
    worker = make_accelerator(mode=mode)
    before, places = run(make_driver, worker), addresses(worker)
    report = worker.sleep(2)
    assert report.bytes_backed_up == 0
    worker.wake_up(TAGS)
    assert addresses(worker) == places
    report = worker.reload_weights()
    assert report.weight_bytes == sum(each.nbytes for each in weights(worker))
    assert addresses(worker) == places
    assert run(make_driver, worker) == before


def test_buffers_survive_level_2(make_accelerator):
    worker = make_accelerator()
    model = worker.get_model()
    with worker.port.pool("weights"):
        table = torch.empty(5, device=worker.port.device)
    model.register_buffer("table", table)
    table.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).to(table.device))
    worker.sleep(2)
    worker.wake_up(("weights",))
    assert worker.port.to_host(table).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def packed_anew(monkeypatch):
    """Have loading put other tensors in the place of parameters: clones, and parts of one cat."""
    load = TorchModelRunner.load_weights

    def loaded(runner, model):
        load(runner, model)
        with torch.no_grad():
            modules = [each for each in model.modules() if hasattr(each, "weight")]
            first, second, third, fourth = modules[:4]
            first.weight = torch.nn.Parameter(first.weight.clone(), requires_grad=False)
            whole = torch.cat([second.weight.reshape(-1), third.weight.reshape(-1)])
            for module, part in zip(
                (second, third),
                whole.split([second.weight.numel(), third.weight.numel()]),
                strict=True,
            ):
                kept = part.view(module.weight.shape)
                module.weight = torch.nn.Parameter(kept, requires_grad=False)
            model.register_buffer("ones", torch.ones(5, device=whole.device))
            fourth.plain = whole[:3]
            fourth.same = fourth.weight = torch.nn.Parameter(fourth.weight * 1, requires_grad=False)
        model.tried = second, third, fourth, whole.numel()

    monkeypatch.setattr(TorchModelRunner, "load_weights", loaded)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_put_in_the_place_of_weights_sleeps_too(
    mode, make_accelerator, make_driver, monkeypatch
):
    expected = run(make_driver, make_accelerator(mode=mode))
    packed_anew(monkeypatch)
    worker = make_accelerator(mode=mode)
    model, pools = worker.get_model(), worker.port.pools
    second, third, fourth, size = model.tried

    def inside(tensor):
        return pools._inside("weights", tensor.data_ptr())

    assert all(map(inside, (*model.parameters(), *model.buffers(), fourth.plain)))
    assert third.weight.data_ptr() == second.weight.data_ptr() + second.weight.nbytes
    assert fourth.plain.data_ptr() == second.weight.data_ptr()
    assert fourth.same is fourth.weight
    assert run(make_driver, worker) == expected
    places, values = addresses(worker), weights(worker)
    report = worker.sleep(1)
    assert (pools.held(), report.bytes_still_held) == (0, 0)
    assert report.bytes_backed_up >= size * second.weight.element_size()
    worker.wake_up(TAGS)
    assert addresses(worker) == places
    assert all(map(torch.equal, weights(worker), values))
    assert run(make_driver, worker) == expected


def test_what_cannot_sleep_is_named_and_counted(make_accelerator, monkeypatch, caplog):
    packed_anew(monkeypatch)
    take_in = PlacedPools.take_in

    def but_one(pools, tag, tensors):
        left = take_in(pools, tag, {k: v for k, v in tensors.items() if not k.endswith("ones")})
        return left | {k: v for k, v in tensors.items() if k.endswith("ones")}

    monkeypatch.setattr(PlacedPools, "take_in", but_one)
    worker = make_accelerator()
    assert "20 bytes of weights do not sleep: .ones" in caplog.text
    assert worker.sleep(1).bytes_still_held == 20


def test_a_part_sleeps_and_wakes_alone(make_accelerator, make_driver):
    worker = make_accelerator()
    before, pools = run(make_driver, worker), worker.port.pools
    of_weights = pools.held(["weights"])
    report = worker.discard(("kv_cache",))
    assert report.bytes_backed_up == 0
    assert pools.held(["kv_cache"]) == 0
    assert pools.held(["weights"]) == of_weights
    worker.wake_up(("kv_cache",))
    assert run(make_driver, worker) == before
    worker.sleep(1)
    worker.wake_up(("weights",))
    assert (pools.held(["weights"]), pools.held(["kv_cache"])) == (of_weights, 0)
    worker.wake_up(("kv_cache",))
    assert run(make_driver, worker) == before


def test_discarded_weights_are_not_backed_up_even_if_they_were_asleep(make_accelerator):
    worker = make_accelerator()
    worker.sleep(1)
    assert worker.discard(("weights",)).bytes_freed == 0
    kept = [piece.backup for piece in worker.port.pools._of(["weights"])]
    assert kept == [None] * len(kept)


def test_a_cache_that_comes_back_is_zero(make_accelerator, make_driver):
    worker = make_accelerator()
    run(make_driver, worker)
    worker.model_runner.workspace.unlock()
    kept = worker.model_runner.workspace.keep("counter", (3,), torch.int32)
    kept.fill_(7)
    worker.discard(("kv_cache",))
    worker.wake_up(("kv_cache",))
    worker.sleep(1)
    worker.wake_up(TAGS)
    for cache in worker.model_runner.kv_cache.layers.values():
        for part in (cache.key, cache.value):
            assert not worker.port.to_host(part).any()
    assert worker.port.to_host(kept).tolist() == [0, 0, 0]


def test_weights_of_another_checkpoint_are_loaded_in_place(
    folder, tmp_path, make_accelerator, make_driver
):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-3)
    model.save_pretrained(tmp_path)
    worker = make_accelerator(description=read_description(str(folder)), mode="full")
    first, places = run(make_driver, worker), addresses(worker)
    worker.sleep(2)
    worker.wake_up(TAGS)
    worker.reload_weights(str(tmp_path))
    second = run(make_driver, worker)
    assert first != second
    assert addresses(worker) == places
    worker.reload_weights()
    assert run(make_driver, worker) == first


def test_a_host_without_memory_for_a_copy_leaves_everything_awake(make_accelerator, make_driver):
    worker = make_accelerator()
    before, pools = run(make_driver, worker), worker.port.pools
    held, buffer = pools.held(), pools._host_buffer

    def none_left(shape, dtype):
        raise MemoryError("the host is full")

    pools._host_buffer = none_left
    with pytest.raises(MemoryError, match="the host is full"):
        worker.sleep(1)
    pools._host_buffer = buffer
    assert pools.held() == held
    assert run(make_driver, worker) == before


def test_a_device_without_memory_lets_waking_be_tried_again(make_accelerator, make_driver):
    worker = make_accelerator()
    before, pools = run(make_driver, worker), worker.port.pools
    worker.sleep(1)
    map_, asked = pools.memory.map, []

    def one_only(address, num_bytes):
        if asked:
            raise torch.OutOfMemoryError("somebody else has it")
        asked.append(address)
        map_(address, num_bytes)

    pools.memory.map = one_only
    with pytest.raises(torch.OutOfMemoryError, match="somebody else has it"):
        worker.wake_up(TAGS)
    pools.memory.map = map_
    worker.wake_up(TAGS)
    assert run(make_driver, worker) == before


def test_shutting_down_gives_everything_back_awake_or_asleep(make_accelerator):
    for asleep in (False, True):
        worker = make_accelerator()
        pools: AddressKeepingPools = worker.port.pools
        if asleep:
            worker.sleep(2)
        worker.shutdown()
        assert (pools.held(), pools.asleep) == (0, 0)


def test_a_device_without_pools_says_so(make_accelerator):
    worker = make_accelerator(ready=False)
    worker.port.pools = None
    for call in (
        lambda: worker.sleep(1),
        lambda: worker.discard(TAGS),
        lambda: worker.wake_up(TAGS),
    ):
        with pytest.raises(UnsupportedError, match="sleep and wake"):
            call()
