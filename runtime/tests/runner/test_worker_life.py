"""The torch worker: its rank and dtype, its memory budget, its life."""

from __future__ import annotations

import logging

import pytest
from attrs import evolve
from hardpoint.config.schema import ParallelConfig
from hardpoint.errors import ConfigError, HardpointError, LifecycleError, MemoryBudgetError
from hardpoint.messages import NewRequestData, SchedulerOutput
from hardpoint.sampling_params import SamplingParams
from hardpoint_runtime.device import MemoryInfo, TorchDeviceOps
from hardpoint_runtime.worker import TorchWorker

GIB = 1 << 30


class Figures:
    """A device whose figures the test sets; records what is asked in which order."""

    def __init__(self, *, free=6 * GIB, total=8 * GIB, held=GIB, peak=2 * GIB):
        super().__init__()
        self.figures = (free, total, held, peak)
        self.calls: list[str] = []

    def set_device(self):
        self.calls.append("set_device")

    def seed(self, seed):
        self.calls.append(f"seed {seed}")

    def memory_info(self):
        self.calls.append("memory_info")
        return MemoryInfo(free=self.figures[0], total=self.figures[1])

    def memory_allocated(self):
        return self.figures[2]

    def peak_memory(self, run):
        self.calls.append("peak_memory")
        run()
        return self.figures[3]


class FiguredWorker(TorchWorker):
    figured: TorchDeviceOps

    def make_device(self):
        return self.figured


@pytest.fixture
def figured(device_class):
    return type("FiguredDevice", (Figures, device_class), {})


@pytest.fixture
def make_worker(make_context, platform, registry, figured):
    def make(*, device=None, explicit=False, share=0.75, context=None, **more):
        context = context or make_context(**more)
        config = context.config
        config = evolve(
            config,
            cache=evolve(config.cache, memory_utilization=share),
            origins={"memory_utilization": "flag --memory-utilization"} if explicit else {},
        )
        worker = FiguredWorker(evolve(context, config=config), platform, registry)
        worker.figured = device or figured()
        return worker

    return make


def test_init_takes_seeds_and_then_measures(make_worker):
    worker = make_worker()
    worker.init_device()
    assert worker.device.calls == ["set_device", "seed 3", "memory_info"]
    assert worker.budget == 6 * GIB


@pytest.mark.parametrize(
    ("total", "share", "budget"), [(100, 0.755, 76), (100, 0.75, 75), (8 * GIB, 1.0, 7 * GIB)]
)
def test_the_budget_is_the_share_rounded_up_but_never_more_than_is_free(
    make_worker, figured, total, share, budget
):
    worker = make_worker(device=figured(total=total, free=min(total, 6 * GIB)), share=share)
    worker.init_device()
    assert worker.budget == budget


def test_an_explicit_share_that_is_not_free_is_an_error_with_the_figures(make_worker, figured):
    worker = make_worker(device=figured(free=GIB), explicit=True)
    with pytest.raises(MemoryBudgetError) as caught:
        worker.init_device()
    assert str(caught.value) == (
        f"memory_utilization = 0.75 of {8 * GIB} bytes are {6 * GIB} bytes, but only {2 * GIB} are "
        "free for this worker; set it to at most 0.25"
    )
    assert caught.value.exit_code == 2


def test_a_default_share_that_is_not_free_is_lowered_and_logged(make_worker, figured, caplog):
    worker = make_worker(device=figured(free=GIB))
    with caplog.at_level(logging.INFO, "hardpoint.worker"):
        worker.init_device()
    assert worker.budget == 2 * GIB
    assert f"{2 * GIB} of {8 * GIB} bytes are free, fewer than memory_utilization" in caplog.text


def test_what_is_left_for_the_cache_may_be_negative(make_worker, figured):
    for peak, left in ((2 * GIB, 4 * GIB), (7 * GIB, -GIB)):
        worker = make_worker(device=figured(peak=peak))
        worker.init_device()
        worker.load_model()
        assert worker.determine_available_memory() == left
        assert worker.device.calls[-1] == "peak_memory"


def test_a_dtype_the_platform_lacks(make_worker):
    worker = make_worker(dtype="float8_e4m3fn")
    with pytest.raises(
        ConfigError, match="dtype = 'float8_e4m3fn': platform 'host' computes in float32"
    ):
        worker.init_device()
    assert worker.figured.calls == []


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"rank": 2, "world_size": 2}, "rank 2 is not in a world of 2"),
        ({"rank": -1}, "rank -1 is not in a world of 1"),
    ],
)
def test_a_rank_that_cannot_be(make_worker, make_context, more, text):
    worker = make_worker(context=evolve(make_context(), **more))
    with pytest.raises(ConfigError, match=text):
        worker.init_device()


@pytest.mark.parametrize(
    ("more", "index"),
    [({}, 0), ({"local_rank": 1}, 1), ({"local_rank": 1, "devices": ("7", "8")}, 7)],
)
def test_a_rank_takes_the_first_device_that_it_owns(make_worker, make_context, more, index):
    assert make_worker(context=evolve(make_context(), **more)).device_index == index


def test_an_id_that_is_no_devices_number_is_an_error(make_worker, make_context):
    worker = make_worker(context=evolve(make_context(), devices=("GPU-1",)))
    with pytest.raises(ConfigError, match="devices: 'GPU-1' is not the number of a device"):
        _ = worker.device_index


def test_a_world_that_is_not_the_configured_one_is_an_error(make_worker, make_context):
    worker = make_worker(context=evolve(make_context(), world_size=2))
    with pytest.raises(ConfigError, match=r"2 workers .* which need 1"):
        worker.init_device()


def test_several_ranks_need_a_rendezvous(make_worker, make_context):
    parallel = ParallelConfig(tensor_parallel_size=2)
    worker = make_worker(context=evolve(make_context(parallel=parallel), world_size=2))
    with pytest.raises(HardpointError, match="rank 0: the executor gave its 2 workers no rendez"):
        worker.init_device()


def test_a_runner_class_can_be_named_and_must_be_one(make_worker, registry):
    registry.model_runner_class = lambda config, platform: "hardpoint.worker:Worker"
    with pytest.raises(TypeError, match=r"not a subclass of .*TorchModelRunner"):
        make_worker().init_device()


def test_before_init_and_after_shutdown_methods_say_what_is_missing(make_worker):
    worker = make_worker()
    with pytest.raises(LifecycleError, match="load_model was called before init_device"):
        worker.load_model()
    worker.shutdown()
    worker.init_device()
    worker.load_model()
    runner = worker.get_model_runner()
    worker.shutdown()
    assert (runner.model, runner.kv_cache, worker.device) == (None, None, None)
    with pytest.raises(LifecycleError, match="execute_model was called before init_device"):
        worker.execute_model(SchedulerOutput(step_id=1))


def test_a_whole_life(make_worker):
    from hardpoint.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheTensor

    worker = make_worker()
    worker.init_device()
    report = worker.load_model()
    parameters = worker.get_model().parameters()
    assert report.weight_bytes == sum(each.numel() * 4 for each in parameters)
    specs = worker.get_kv_cache_spec()
    page = 2 * 4 * (8 + 8) * 4  # kv heads, block, keys and values, bytes
    assert worker.get_cache_block_size_bytes() == 2 * page
    spec = next(iter(specs.values()))
    worker.initialize_from_config(
        KVCacheConfig(
            num_blocks=9,
            groups=(KVCacheGroup(layers=tuple(specs), spec=spec),),
            tensors=tuple(KVCacheTensor(num_bytes=page * 9, layers=(name,)) for name in specs),
        )
    )
    assert worker.compile_or_warm_up_model().language_s > 0
    request = NewRequestData(
        req_id="a", prompt=(1, 2), sampling=SamplingParams(temperature=0), block_ids=((1,),)
    )
    plan = SchedulerOutput(step_id=5, new=(request,), num_tokens={"a": 2}, total_tokens=2)
    output = worker.execute_model(plan)
    assert (output.step_id, output.req_ids) == (5, ("a",))
    assert len(output.tokens[0]) == 1
    worker.update_max_model_len(7)
    assert worker.get_model_runner().max_model_len == 7


def test_a_cache_that_the_device_does_not_give_is_an_error_with_the_figures(make_runner):
    with pytest.raises(MemoryBudgetError, match=r"of 1099511627776 blocks needs \d{15,} bytes"):
        make_runner(num_blocks=1 << 40)


def test_a_cancelled_load_ends(make_worker):
    from hardpoint.errors import CancelledStepError

    worker = make_worker(cancelled=lambda: True)
    worker.init_device()
    with pytest.raises(CancelledStepError):
        worker.load_model()
