"""The driver's side: chosen only by name, complete, honest about its settings."""

from __future__ import annotations

import inspect
import subprocess
import sys
from contextlib import suppress

import pytest
from hardpoint.adapters import LoRARequest, PromptAdapterRequest
from hardpoint.capabilities import RESERVED, YES, Capability
from hardpoint.config.loading import load_config
from hardpoint.errors import CancelledStepError, ConfigError, MemoryBudgetError, NoPlatformError
from hardpoint.kv_cache import KVCacheConfig
from hardpoint.messages import SchedulerOutput, StepTicket
from hardpoint.platform import Platform, RequestView
from hardpoint.registry import Registry
from hardpoint.rpc.faults import fired
from hardpoint.sampling_params import SamplingParams
from hardpoint.selection import explain_selection, select_platform
from hardpoint.worker import Worker
from hardpoint_dummy.faults import DummyFault, Fault, FaultPoints, parse_faults
from hardpoint_dummy.pause import pause
from hardpoint_dummy.platform import DummyPlatform
from hardpoint_dummy.settings import DummySettings


def test_it_is_never_chosen_unless_named():
    config = load_config(overrides={"plugins.disable": ["cpu"]}, environ={})
    registry = Registry.discover(config)
    verdicts = dict(explain_selection(registry, config))
    assert verdicts["dummy"].available
    assert "only when named" in verdicts["dummy"].reason
    with pytest.raises(NoPlatformError, match="dummy"):
        select_platform(registry, config)
    named = load_config(overrides={"platform": "dummy"}, environ={})
    assert select_platform(Registry.discover(named), named).name == "dummy"


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        ("3,1", ["3", "1"]), (" 2 , GPU-8a6f1c9e-0000", ["2", "0"]), ("1,1", ["1"]),
        ("9,3", ["3"]),
    ],
)  # fmt: skip
def test_it_has_the_devices_that_its_variable_leaves(monkeypatch, mask, seen):
    platform = DummyPlatform(DummySettings(num_devices=4))
    assert [device.id for device in platform.probe().devices] == ["0", "1", "2", "3"]
    monkeypatch.setenv("DUMMY_VISIBLE_DEVICES", mask)
    assert [device.id for device in platform.probe().devices] == seen


@pytest.mark.parametrize("mask", ["", "7"])
def test_without_a_visible_device_it_cannot_be_used(monkeypatch, mask):
    monkeypatch.setenv("DUMMY_VISIBLE_DEVICES", mask)
    verdict = DummyPlatform().probe()
    assert not verdict.available
    assert f"DUMMY_VISIBLE_DEVICES={mask} hides" in verdict.reason


def test_it_offers_every_capability_that_the_contract_has():
    platform = DummyPlatform()
    for capability in set(Capability) - RESERVED - {Capability.LOGITS_PROCESSORS}:
        assert platform.support(capability) is YES
        platform.require(capability)


def test_its_limits_are_its_settings():
    settings = DummySettings(
        mixed_batches=False, max_prefills_per_step=1, chunk_multiple=4, reserved_blocks=3,
        max_num_seqs=2, max_num_batched_tokens=10, block_sizes=(8,),
    )  # fmt: skip
    limits = DummyPlatform(settings).limits(load_config(environ={}))
    for name in (
        "mixed_batches", "max_prefills_per_step", "chunk_multiple", "reserved_blocks",
        "max_num_seqs", "max_num_batched_tokens", "block_sizes",
    ):  # fmt: skip
        assert getattr(limits, name) == getattr(settings, name)


def test_placement_follows_the_sizes_or_the_setting():
    config = load_config(
        overrides={"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, environ={}
    )
    placement = DummyPlatform().placement(config)
    assert (placement.num_workers, placement.output_rank) == (6, 4)
    assert DummyPlatform(DummySettings(num_workers=9)).placement(config).num_workers == 9


def test_words_are_refused_before_queueing():
    view = RequestView(req_id="a", num_prompt_tokens=1, sampling=SamplingParams(bad_words="x"))
    problem = DummyPlatform().check_request(view)
    assert (problem.key, problem.way_out) == ("bad_words", "Use logit_bias.")
    fine = RequestView(req_id="a", num_prompt_tokens=1, sampling=SamplingParams())
    assert DummyPlatform().check_request(fine) is None


def test_two_platforms_have_their_own_settings():
    one, two = DummyPlatform(DummySettings(exclusive=True)), DummyPlatform()
    assert (one.exclusive, two.exclusive, DummyPlatform.exclusive) == (True, False, False)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", ()),
        ("load", (Fault(point="load"),)),
        ("step:3@1=hang", (Fault(point="step", nth=3, rank=1, kind="hang"),)),
        ("step:2, sample", (Fault(point="step", nth=2), Fault(point="sample"))),
    ],
)
def test_faults_are_read(text, faults):
    assert parse_faults(text) == faults


@pytest.mark.parametrize(
    ("text", "message"),
    [("lod", "no fault point"), ("step:x", "not of the form"), ("step=burn", "no kind of fault")],
)
def test_malformed_faults_are_problems_of_the_configuration(text, message):
    with pytest.raises(ValueError, match=message):
        parse_faults(text)
    [problem] = DummyPlatform(DummySettings(fail_at=text)).check(load_config(environ={}))
    assert problem.key == "plugins.dummy.fail_at"
    assert message in problem.message


def test_a_fault_fires_at_its_passage_and_is_counted():
    points = FaultPoints(parse_faults("step:2@0,load@1"), 0, hang=lambda: None)
    points("load")
    points("step")
    with pytest.raises(DummyFault) as caught:
        points("step")
    assert caught.value.args == ("step", 2, 0)
    points("step")
    assert points.passed == {"load": 1, "step": 3}


def test_a_hanging_fault_ends_when_the_driver_gives_up():
    gave_up = []

    def hang():
        pause(3600, lambda: gave_up.append(1) or len(gave_up) > 3)

    with pytest.raises(CancelledStepError):
        FaultPoints(parse_faults("step=hang"), 0, hang=hang)("step")


def test_the_cache_must_fit_the_memory(make_driver):
    with pytest.raises(MemoryBudgetError, match="does not fit: 5904 of 10000 bytes are free"):
        make_driver(**{"plugins.dummy.memory_bytes": 10_000})
    with pytest.raises(ConfigError, match="memory_bytes"):
        make_driver(**{"plugins.dummy.memory_bytes": -1})


def test_it_records_every_call(driver):
    driver.start("a", (1, 2))
    driver.worker.reset_prefix_cache()
    assert driver.worker.recorded_calls() == (
        ("init_device", None),
        ("load_model", None),
        ("get_kv_cache_spec", None),
        ("initialize_from_config", 64),
        ("compile_or_warm_up_model", None),
        ("execute_model", 1),
        ("reset_prefix_cache", None),
    )


def test_no_call_of_the_contract_goes_unrecorded(make_driver):
    """Each method of the contract, called with what it takes, notes its own name first."""
    driver = make_driver()
    lora = LoRARequest(id=1, name="n", path="p")
    soft = PromptAdapterRequest(id=1, name="n", path="p", num_virtual_tokens=1)
    first = {"request": {"add_lora": lora, "add_prompt_adapter": soft}}
    accessors = {"rank", "is_driver_worker", "model_runner_class", "get_model", "get_model_runner"}
    accessors |= {"other_calls"}
    values = {
        "lora_id": 1, "prompt_adapter_id": 1, "max_model_len": 9, "level": 1, "tags": ("weights",),
        "path": None, "pattern": None, "max_size": None, "is_start": False, "grammar": None,
        "scheduler_output": SchedulerOutput(step_id=1), "ticket": StepTicket(step_id=1),
        "kv_cache_config": KVCacheConfig(num_blocks=2, groups=(), tensors=()),
    }  # fmt: skip
    seen = set()
    for name in sorted(set(vars(Worker)) - accessors):
        if name.startswith("_"):
            continue
        method = getattr(driver.worker, name)
        parameters = inspect.signature(method).parameters.values()
        given = {
            each.name: first.get(each.name, {}).get(name, values.get(each.name))
            for each in parameters
            if each.default is each.empty
        }
        before = len(driver.worker.recorded_calls())
        with suppress(Exception):  # what it then does is another matter
            method(**given)
        assert driver.worker.recorded_calls()[before][0] == name
        seen.add(name)
    assert len(seen) > 30
    assert {"get_kv_cache_layouts", "execute_dummy_batch", "discard", "shutdown"} <= seen


def test_its_light_module_and_its_worker_need_no_array_library():
    code = (
        "import sys, hardpoint_dummy.plugin; light = set(sys.modules); "
        "import hardpoint_dummy.worker; "
        "print([n for n in light if n.startswith('hardpoint_dummy')], "
        "{'torch', 'numpy'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "hardpoint_dummy.platform" not in out.stdout
    assert out.stdout.strip().endswith("set()")


def test_faults_that_fired_are_counted_where_others_can_read_them(tmp_path):
    points = FaultPoints(parse_faults("step:2"), 0, hang=lambda: None, log=str(tmp_path))
    points("step")
    assert fired(tmp_path, "step") == 0
    with pytest.raises(DummyFault):
        points("step")
    assert fired(tmp_path, "step") == 1


def test_a_worker_runs_out_of_memory_on_demand():
    with pytest.raises(MemoryError, match="injected"):
        FaultPoints(parse_faults("load=memory_error"), 0, hang=lambda: None)("load")


def test_how_long_a_worker_may_be_silent_can_be_set():
    assert DummyPlatform(DummySettings(silent_after=0.5)).silent_after == 0.5
    assert DummyPlatform().silent_after == Platform.silent_after
