"""Pools whose tensors get other memory when they wake."""

from __future__ import annotations

import pytest
import torch
from hardpoint_runtime.accelerator.moving_pools import MovingPools


class Bench:
    def __init__(self):
        self.waits = self.given_back = 0
        self.pools = MovingPools(self.host_buffer, self.wait, self.give_back)

    def host_buffer(self, shape, dtype):
        return torch.empty(tuple(shape), dtype=dtype)

    def wait(self):
        self.waits += 1

    def give_back(self):
        self.given_back += 1


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
def pools(bench):
    return bench.pools


def made(pools, tag, *shape):
    with pools.use(tag):
        return torch.empty(*shape)


def test_kept_contents_come_back_through_every_view(pools):
    weights = made(pools, "weights", 4, 8)
    weights.copy_(torch.arange(32.0).view(4, 8))
    turned, row = weights.t(), weights[2]
    report = pools.sleep(("weights",), keep=("weights",))
    assert (report.bytes_freed, report.bytes_backed_up, report.bytes_still_held) == (128, 128, 0)
    assert weights.untyped_storage().nbytes() == 0
    report = pools.wake(("weights",))
    assert report.bytes_still_held == 128
    assert weights.tolist() == torch.arange(32.0).view(4, 8).tolist()
    assert turned[1].tolist() == [1.0, 9.0, 17.0, 25.0]
    assert row.tolist() == list(range(16, 24))


def test_what_is_not_kept_comes_back_undefined_and_its_backup_goes(pools):
    weights = made(pools, "weights", 8)
    pools.sleep(("weights",), keep=("weights",))
    report = pools.sleep(("weights",))  # no second copy, nothing freed twice
    assert (report.bytes_freed, report.bytes_backed_up) == (0, 0)
    (noted,) = pools._noted
    assert noted.backup is None
    pools.wake(("weights",))
    assert weights.fill_(3).tolist() == [3.0] * 8


def test_tags_sleep_apart(pools):
    weights, cache = made(pools, "weights", 8), made(pools, "kv_cache", 16)
    pools.sleep(("kv_cache",))
    assert (weights.untyped_storage().nbytes(), cache.untyped_storage().nbytes()) == (32, 0)
    assert (pools.held(), pools.held(["weights"]), pools.held(["kv_cache"])) == (32, 32, 0)
    pools.wake(("weights",))
    assert cache.untyped_storage().nbytes() == 0
    pools.wake(("kv_cache", "weights"))
    assert pools.held() == 96


def test_what_nobody_uses_any_more_is_forgotten(pools):
    weights = made(pools, "weights", 8)
    assert pools.held() == 32
    del weights
    assert pools.held() == 0
    assert pools.sleep(("weights",), keep=("weights",)).bytes_backed_up == 0


def test_a_view_is_no_second_piece(pools):
    with pools.use("weights"):
        weights = torch.zeros(8)
        half = torch.empty_like(weights)[:4]
        weights.view(2, 4)
    assert pools.held() == 64
    assert half.numel() == 4


def test_what_is_made_outside_is_not_counted(pools):
    made(pools, "weights", 1)
    outside = torch.empty(8)
    pools.sleep(("weights", "kv_cache"))
    assert outside.untyped_storage().nbytes() == 32


def test_the_device_is_waited_for_and_given_its_memory_back(bench):
    weights = made(bench.pools, "weights", 8)
    bench.pools.sleep(("weights",))
    assert (bench.waits, bench.given_back, weights.untyped_storage().nbytes()) == (2, 1, 0)


def test_no_memory_for_the_copies_leaves_all_awake(bench, monkeypatch):
    weights, cache = made(bench.pools, "weights", 8), made(bench.pools, "kv_cache", 8)

    def none(shape, dtype):
        raise MemoryError("no host memory")

    monkeypatch.setattr(bench.pools, "_host_buffer", none)
    with pytest.raises(MemoryError):
        bench.pools.sleep(("weights", "kv_cache"), keep=("weights",))
    assert [each.untyped_storage().nbytes() for each in (weights, cache)] == [32, 32]


def test_a_model_sleeps_and_computes_the_same_again(pools):
    with pools.use("weights"):
        layer = torch.nn.Linear(8, 8)
    given = torch.randn(3, 8)
    before = layer(given)
    pools.sleep(("weights",), keep=("weights",))
    pools.wake(("weights",))
    assert torch.equal(layer(given), before)


def test_what_other_operations_made_is_taken_in_once(pools):
    weights = made(pools, "weights", 8)
    clone, sparse = weights.clone(), torch.eye(3).to_sparse()
    tensors = {"weights": weights, "clone": clone, "view": clone[2:], "nothing": torch.empty(0)}
    assert list(pools.take_in("weights", {**tensors, "sparse": sparse})) == ["sparse"]
    assert pools.held(["weights"]) == 64
    clone.fill_(3)
    assert pools.sleep(("weights",), keep=("weights",)).bytes_freed == 64
    assert clone.untyped_storage().nbytes() == 0
    pools.wake(("weights",))
    assert tensors["view"].tolist() == [3.0] * 6
