"""The worker's life and services: memory, sleep, reload, saving and loading, on real buffers."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
from hardpoint.checkpoints import read_description
from hardpoint.checkpoints.saving import Saving
from hardpoint.checkpoints.sharded_state import manifest_of
from hardpoint.errors import CheckpointError, LifecycleError, MemoryBudgetError
from hardpoint.sampling_params import SamplingParams
from hardpoint_tpu.memory_estimate import temporary_bytes
from hardpoint_tpu.platform import LABEL

FEW = {"request_buckets": (4,), "token_buckets": (64,)}


def resident() -> int:
    """Bytes of this process in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def ids(worker, drive) -> list[int]:
    driver = drive(worker)
    driver.finished = set(worker.get_model_runner().requests.ids)
    driver.add("a", range(20), SamplingParams(temperature=0))
    return driver.run(4)["a"]


@pytest.fixture(scope="module")
def worker(module_workers):
    """One for all tests that leave it awake, with the weights that it had."""
    return module_workers(settings=FEW)


def arrays(worker):
    runner = worker.get_model_runner()
    return runner.model.params.arrays()


def test_nothing_works_before_the_device_is_taken(make_worker):
    worker = make_worker(start=False)
    with pytest.raises(LifecycleError, match="before init_device"):
        worker.load_model()
    worker.init_device()
    with pytest.raises(LifecycleError, match="get_model was called before load_model"):
        worker.get_model()
    with pytest.raises(LifecycleError, match="before initialize_kv_cache"):
        worker.compile_or_warm_up_model()


def test_the_report_adds_up(worker):
    report = worker.memory_report()
    runner = worker.get_model_runner()
    parameters = sum(tensor.size for _, tensor in runner.model.tensors())
    assert report.weights == parameters * 4
    assert report.kv_cache == 60 * sum(
        spec.page_bytes for spec in worker.get_kv_cache_spec().values()
    )
    assert report.kv_cache == 60 * worker.get_cache_block_size_bytes()
    assert report.temporaries > 0
    assert report.held == report.weights + report.kv_cache < report.limit
    assert (report.backend, report.label) == ("cpu", LABEL)


def test_what_is_left_covers_the_work_space(worker):
    report = worker.memory_report()
    runner = worker.get_model_runner()
    estimate = temporary_bytes(runner.shape, runner.buckets, 8)
    assert report.temporaries <= estimate
    assert worker.determine_available_memory() == report.limit - report.weights - estimate


def test_weights_that_do_not_fit_are_refused_with_the_figures(make_worker, description):
    large = description(vocab_size=40_000)
    worker = make_worker(start=False, description=large, settings={"memory_bytes": 1 << 20})
    worker.init_device()
    with pytest.raises(MemoryBudgetError, match=r"raise .* or plugins.tpu.memory_bytes"):
        worker.load_model()


def test_level_one_keeps_a_copy_and_wakes_bit_for_bit(worker, drive):
    expected = ids(worker, drive)
    before = {name: tensor.copy() for name, tensor in worker.get_model().tensors()}
    held = worker.memory_report()
    old = arrays(worker)
    old += [array for pair in worker.get_model_runner().cache.take(0, 2) for array in pair]
    report = worker.sleep(1)
    assert all(array.is_deleted() for array in old)
    assert report.bytes_freed == held.held
    assert report.bytes_backed_up == held.weights
    assert report.bytes_still_held == worker.memory_report().held == 0
    with pytest.raises(LifecycleError, match="sleeps"):
        ids(worker, drive)
    assert worker.wake_up(["weights"]).bytes_still_held == held.weights
    with pytest.raises(LifecycleError, match="KV cache has no memory"):
        ids(worker, drive)
    assert worker.wake_up(["kv_cache"]).bytes_still_held == held.held
    after = dict(worker.get_model().tensors())
    assert all((after[name] == tensor).all() for name, tensor in before.items())
    assert ids(worker, drive) == expected


def test_level_two_drops_everything_until_a_reload(worker, drive):
    expected = ids(worker, drive)
    held = worker.memory_report().held
    report = worker.sleep(2)
    assert (report.bytes_freed, report.bytes_backed_up) == (held, 0)
    assert worker.wake_up(["weights", "kv_cache"]).bytes_still_held == held
    assert not any(np.asarray(array).any() for array in arrays(worker))
    loaded = worker.reload_weights()
    assert loaded.weight_bytes == worker.memory_report().weights
    assert ids(worker, drive) == expected
    assert worker.program_report().traces == worker.program_report().shapes


def test_discarding_one_tag_leaves_the_other(worker, drive):
    expected = ids(worker, drive)
    held = worker.memory_report()
    assert worker.discard(["kv_cache"]).bytes_freed == held.kv_cache
    assert worker.memory_report().weights == held.weights
    worker.wake_up(["kv_cache"])
    assert ids(worker, drive) == expected


def test_sleeping_gives_the_memory_back_to_the_system(make_worker, description):
    """On the CPU a device's memory is this process's: what is freed is no longer resident."""
    wide = description(vocab_size=60_000, hidden_size=240)
    worker = make_worker(start=False, description=wide)
    worker.init_device()
    weights = worker.load_model().weight_bytes
    assert weights > 50 << 20
    gc.collect()
    before = resident()
    worker.discard(["weights"])
    gc.collect()
    assert before - resident() >= 0.8 * weights


def test_a_model_of_another_shape_is_not_loaded_into_this_one(worker, monkeypatch, description):
    import hardpoint_tpu.model_runner as module

    monkeypatch.setattr(module, "read_description", lambda path, kind: description(num_layers=3))
    with pytest.raises(LifecycleError, match="another shape"):
        worker.reload_weights("elsewhere")


# Saving and loading.


def save(worker, folder, **more):
    with Saving(folder) as saving:
        files = worker.save_sharded_state(
            str(saving.place), more.get("pattern"), more.get("max_size")
        )
        saving.commit(manifest_of(worker.config, [files]))
    return files


@pytest.mark.parametrize("devices", [1, 2])
def test_what_is_saved_is_loaded_bit_for_bit_by_any_number_of_devices(
    make_worker, tmp_path, drive, devices
):
    first = make_worker(settings=FEW, tensor_parallel_size=devices)
    files = save(first, tmp_path, max_size=8000)
    assert len(files) > 3
    largest = max(size for _, size in sizes(first))
    assert all(file.num_bytes <= max(8000, largest + 1000) for file in files)
    assert all(file.tensors for file in files)
    found = read_description(tmp_path, "sharded_state")
    second = make_worker(settings=FEW, description=found)
    before, after = dict(first.get_model().tensors()), dict(second.get_model().tensors())
    assert before.keys() == after.keys()
    assert all((after[name] == tensor).all() for name, tensor in before.items())
    assert ids(second, drive) == ids(first, drive)


def sizes(worker):
    return [(name, tensor.nbytes) for name, tensor in worker.get_model().tensors()]


def loading(make_worker, found, **more):
    worker = make_worker(start=False, description=found, **more)
    worker.init_device()
    return worker.load_model


def test_a_state_that_does_not_fit_is_told_with_every_difference(worker, make_worker, tmp_path):
    save(worker, tmp_path)
    found = read_description(tmp_path, "sharded_state")
    with pytest.raises(CheckpointError, match=r"22 different|different: .* not .* of bfloat16"):
        loading(make_worker, found, dtype="bfloat16")()


def test_a_changed_part_is_told_before_it_is_used(worker, make_worker, tmp_path):
    (file,) = save(worker, tmp_path)
    found = read_description(tmp_path, "sharded_state")
    path = tmp_path / file.name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="contents are not those that were saved"):
        loading(make_worker, found)()


def test_a_state_of_several_workers_is_refused(worker, make_worker, tmp_path):
    with Saving(tmp_path) as saving:
        files = [
            worker.save_sharded_state(str(saving.place), f"{rank}-{{part}}", None)
            for rank in range(2)
        ]
        saving.commit(manifest_of(worker.config, files))
    found = read_description(tmp_path, "sharded_state")
    with pytest.raises(CheckpointError, match="saved by 2 workers, and here is one"):
        loading(make_worker, found)()


def test_saving_needs_a_folder(worker, tmp_path):
    with pytest.raises(CheckpointError, match="is no folder"):
        worker.save_sharded_state(str(tmp_path / "none"), None, None)
