"""A layer shared out over virtual devices, by one worker: the same ids, evenly spread or not."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hardpoint.sampling_params import SamplingParams

FEW = {"request_buckets": (4,), "token_buckets": (64,)}


@pytest.fixture(scope="module")
def whole(module_workers):
    return module_workers(settings=FEW)


def run(worker, drive, logprobs=None):
    driver = drive(worker)
    driver.finished = set(worker.get_model_runner().requests.ids)
    for index in range(3):
        params = SamplingParams(temperature=0, logprobs=-1)
        if index == 2:
            params = SamplingParams(temperature=1.1, seed=5, top_p=0.9, logprobs=-1)
        driver.add(f"r{index}", range(index, 20 + 5 * index), params)
    ids = driver.run(4)
    values = [
        dict(zip(row.ids[0][1:], row.values[0][1:], strict=True))
        for rows in driver.logprobs.values()
        for row in rows
    ]
    return ids, np.asarray([[row[token] for token in range(97)] for row in values])


@pytest.mark.parametrize("devices", [2, 3])
def test_as_many_devices_give_the_same_ids(make_worker, whole, drive, devices):
    """Two devices: 2 + 1 key-value heads; three: one each."""
    worker = make_worker(settings=FEW, tensor_parallel_size=devices)
    assert len(worker.devices) == len(set(worker.devices)) == devices
    ids, values = run(worker, drive)
    expected, wanted = run(whole, drive)
    assert ids == expected
    np.testing.assert_allclose(values, wanted, atol=1e-4)
    report = worker.program_report()
    assert report.traces == report.shapes


def test_each_device_holds_its_part_of_layers_and_cache(make_worker):
    worker = make_worker(settings=FEW, tensor_parallel_size=3)
    runner = worker.get_model_runner()
    keys, _ = runner.cache.take(0, 1)[0]
    assert {shard.data.shape for shard in keys.addressable_shards} == {(60, 8, 1, 8)}
    assert {shard.device for shard in keys.addressable_shards} == set(worker.devices)
    qkv = runner.model.params.layers[0]["qkv"]
    assert {shard.data.shape for shard in qkv.addressable_shards} == {((2 + 2) * 8, 24)}
    spec = next(iter(worker.get_kv_cache_spec().values()))
    assert spec.num_kv_heads == 3


def test_an_uneven_spread_pays_with_heads_of_zeros(make_worker):
    worker = make_worker(settings=FEW, tensor_parallel_size=2, start=False)
    worker.init_device()
    spec = next(iter(worker.get_kv_cache_spec().values()))
    assert spec.num_kv_heads == 4
    assert worker.limit == 2 * int((1 << 28) * 0.9)


def test_there_are_three_virtual_devices_here():
    assert len(jax.devices("cpu")) >= 3
