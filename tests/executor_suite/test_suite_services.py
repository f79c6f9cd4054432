"""Every service of the Executor, over every executor (rows X1 to X25)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from importlib.metadata import version

import pytest
from attrs import evolve
from hardpoint import API
from hardpoint.adapters import LoRARequest, PromptAdapterRequest
from hardpoint.capabilities import NOT_YET, YES, Capability
from hardpoint.checkpoints.sharded_state import read_manifest
from hardpoint.errors import ConfigError, InvalidRequestError, RemoteError, UnsupportedError
from hardpoint.executor import Executor
from hardpoint.messages import StepTicket
from hardpoint.records import WarmUpReport
from hardpoint.sleep import SleepStateError
from hardpoint.worker_calls import DivergedError


def test_the_attributes_of_the_field_are_there(group):
    config = group.config
    assert group.model_config is config.model
    assert group.cache_config is config.cache
    assert group.load_config is config.load
    assert group.parallel_config is config.parallel
    assert group.scheduler_config is config.scheduler
    assert group.device_config is config.device
    assert group.lora_config is config.lora
    assert group.speculative_config is config.speculative
    assert group.prompt_adapter_config is config.prompt_adapter
    assert group.observability_config is config.observability
    assert isinstance(group.logger, logging.Logger)
    assert (group.is_sleeping, group.sleeping_tags) == (False, frozenset())
    assert group.kv_output_aggregator is group.ec_output_aggregator is None
    assert group.uses_ray is (config.executor in ("ray", "ray_legacy"))


def test_an_executor_must_implement_four_methods():
    class Incomplete(Executor):
        pass

    with pytest.raises(TypeError, match="call_workers, probe_health, start_workers, stop_workers"):
        Incomplete(None, None, None)


# The step.


def test_a_step_gives_the_output_ranks_output(group, steps):
    plan = steps.new()
    output = group.execute_model(plan)
    assert (output.step_id, output.req_ids) == (plan.step_id, ("a",))
    again = group.execute_model(steps.next(3, 1), non_block=True).result(60)
    assert len(again.tokens[0]) == 1
    assert again.nan_counts == {}


def test_a_deferred_step_gives_a_ticket_then_its_output(group, steps):
    ticket = group.execute_model(steps.new(defer_sampling=True))
    assert ticket == StepTicket(step_id=1)
    output = group.sample_tokens(ticket)
    assert (output.step_id, len(output.tokens[0])) == (1, 1)
    with pytest.raises(RemoteError, match="does not wait for sampling"):
        group.sample_tokens(ticket)


def test_a_deferred_step_chooses_what_an_immediate_one_chooses(launcher, steps):
    deferred, immediate = launcher.ready(), launcher.ready()
    ticket = deferred.execute_model(steps.new(defer_sampling=True))
    assert deferred.sample_tokens(ticket).tokens == immediate.execute_model(steps.new()).tokens


def test_the_event_loop_runs_while_a_step_is_awaited(group, steps, gate):
    """The step queues behind a call that only the loop's own ticks let pass."""

    async def tick():
        for _ in range(20):
            await asyncio.sleep(0)
        gate.open()

    async def both():
        output, _ = await asyncio.gather(group.execute_model_async(steps.new()), tick())
        return output

    held = group.collective_rpc(gate.passing, args=gate.args, non_block=True)
    output = asyncio.run(both())
    assert output.step_id == 1
    assert held.done()
    assert len(asyncio.run(group.check_health_async())) == group.world_size
    asyncio.run(group.stop_remote_worker_execution_loop_async())
    group.stop_remote_worker_execution_loop()


# Memory and the KV cache.


def test_memory_is_told_by_rank_and_blocks_are_the_least(launcher, world_size):
    group = launcher.loaded()
    free = (64 << 20) - 4096
    assert group.determine_available_memory() == [free] * world_size
    page = sum(spec.page_bytes for spec in group.get_kv_cache_specs()[0].values())
    assert group.collective_rpc("get_cache_block_size_bytes") == [page] * world_size
    assert group.determine_num_available_blocks() == (free // page, 0)


def test_blocks_are_those_of_the_poorest_rank(launcher, world_size):
    def take_from_middle(worker):
        worker.memory.total -= 1_000_000 * (worker.rank == world_size // 2)

    group = launcher.loaded()
    group.collective_rpc(take_from_middle)
    available = group.determine_available_memory()
    page = sum(spec.page_bytes for spec in group.get_kv_cache_specs()[0].values())
    assert available[world_size // 2] == (64 << 20) - 4096 - 1_000_000
    assert group.determine_num_available_blocks() == (min(available) // page, 0)
    assert world_size == 1 or min(available) < max(available)


def test_too_little_memory_is_no_blocks_never_fewer(launcher):
    group = launcher.loaded(**{"plugins.dummy.memory_bytes": 1000})
    assert group.determine_available_memory()[0] < 0
    assert group.determine_num_available_blocks() == (0, 0)


def test_each_rank_gets_its_own_plan(launcher, world_size):
    group = launcher.loaded()
    plans = launcher.plans(group, num_blocks=20)
    group.initialize_cache(plans)
    for calls in group.collective_rpc("recorded_calls"):
        assert ("initialize_from_config", 20) in calls
        assert [name for name, _ in calls][-2:] == [
            "initialize_from_config",
            "compile_or_warm_up_model",
        ]
    assert group.warm_up_report is not None


def test_the_slowest_rank_s_warm_up_is_kept(group, world_size):
    reports = [WarmUpReport(language_s=0.5 + rank, encoder_s=0.25) for rank in range(world_size)]
    group.collective_rpc = lambda method: reports[::-1]
    assert group.compile_or_warm_up_model() == reports[-1] == group.warm_up_report


def test_plans_that_cannot_be_right_are_refused(launcher, world_size):
    group = launcher.loaded()
    plans = launcher.plans(group)
    with pytest.raises(ConfigError, match=f"KV cache plans for {world_size} workers"):
        group.initialize_from_config([*plans, plans[0]])
    if world_size > 1:
        with pytest.raises(ConfigError, match="ranks would differ in KV blocks"):
            group.initialize_from_config([evolve(plans[0], num_blocks=5), *plans[1:]])


def test_a_cache_for_less_than_one_request_is_an_error_naming_the_key(launcher):
    group = launcher.loaded()
    with pytest.raises(ConfigError, match="max_model_len = 64: the KV cache of 16 blocks holds 60"):
        group.initialize_cache(launcher.plans(group, num_blocks=16))


def test_how_many_requests_fit_is_logged(launcher, caplog):
    group = launcher.loaded()
    with caplog.at_level(logging.INFO, logger="hardpoint"):
        group.initialize_cache(launcher.plans(group, num_blocks=33))
    assert "33 blocks, 128 tokens, 2.00 requests of 64 tokens at once" in caplog.text


def test_the_layout_is_the_first_that_all_ranks_share(launcher, world_size):
    group = launcher.loaded()
    assert group.get_kv_cache_layout() == "NHD"
    offers = [("A", "B"), ("B", "C"), ("B",)][:world_size]
    group.collective_rpc = lambda method: offers
    assert group.get_kv_cache_layout() == ("A" if world_size == 1 else "B")
    group.collective_rpc = lambda method: [("A",), ("B",)]
    with pytest.raises(ConfigError, match="share no KV cache layout"):
        group.get_kv_cache_layout()


def test_a_fitted_length_reaches_every_rank(group, steps):
    group.update_max_model_len(2)
    with pytest.raises(RemoteError, match="request a: position 2 is beyond max_model_len = 2"):
        group.execute_model(steps.new())


def test_caches_are_reset_on_every_rank(group):
    group.reset_prefix_cache()
    group.reset_mm_cache()
    group.reset_encoder_cache()
    for calls in group.collective_rpc("recorded_calls"):
        assert [name for name, _ in calls][-3:] == [
            "reset_prefix_cache",
            "reset_mm_cache",
            "reset_encoder_cache",
        ]


# The model.


def test_tasks_are_asked_once(group):
    assert group.supported_tasks() == group.supported_tasks() == ("generate", "embed")
    names = [name for name, _ in group.collective_rpc("recorded_calls")[0]]
    assert names.count("supported_tasks") == 1


def test_a_function_is_applied_to_every_model(group, world_size):
    assert group.apply_model(lambda model: model.vocab_size) == [256] * world_size


def test_weights_are_reloaded_in_place(group, steps):
    before = group.apply_model(lambda model: model.weights)
    group.reload_weights("elsewhere")
    assert group.apply_model(lambda model: model.weights) != before
    group.reload_weights()
    assert group.apply_model(lambda model: model.weights) == before


def test_weights_are_saved_in_parts_with_their_digests(group, tmp_path, world_size):
    per_rank = group.save_sharded_state(str(tmp_path), max_size=1000)
    assert len(per_rank) == world_size
    names = [file.name for files in per_rank for file in files]
    assert len(set(names)) == len(names) == 5 * world_size
    for files in per_rank:
        for file in files:
            data = (tmp_path / file.name).read_bytes()
            assert hashlib.sha256(data).hexdigest() == file.sha256
            assert 0 < len(data) == file.num_bytes <= 1000
    manifest = read_manifest(tmp_path)
    assert manifest.files == tuple(map(tuple, per_rank))
    assert (manifest.dtype, manifest.api) == ("float32", API)
    (plugin,) = [each for each in manifest.plugins if each.startswith("platform")]
    assert plugin == f"platform dummy: hardpoint-dummy {version('hardpoint-dummy')}, API 2.0"
    with pytest.raises(RemoteError, match="is no folder"):
        group.save_sharded_state(str(tmp_path / "absent"))


def test_a_pattern_that_cannot_work_is_refused_before_anything_is_sent(group):
    before = group.collective_rpc("recorded_calls")
    for pattern, message in (
        ("model-{rank}", "lacks"),
        ("model-{rank}-{part}-{nonsense}", "unknown fields"),
        ("model-{part", "is malformed"),
        ("../{rank}-{part}", "without folders"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            group.save_sharded_state("x", pattern)
    with pytest.raises(InvalidRequestError, match="max_size"):
        group.save_sharded_state("x", max_size=0)
    assert group.collective_rpc("recorded_calls") == before


def test_every_rank_joins_an_inert_batch(group):
    group.execute_dummy_batch()
    for calls in group.collective_rpc("recorded_calls"):
        assert calls[-1] == ("execute_dummy_batch", None)


def test_drafts_are_taken_once(launcher, steps):
    group = launcher.ready(num_speculative_tokens=2)
    output = group.execute_model(steps.new())
    drafts = group.take_draft_token_ids()
    assert drafts.req_ids == ("a",)
    assert drafts.drafts[0] == output.drafts["a"]
    assert len(drafts.drafts[0]) == 2
    assert group.take_draft_token_ids() is None


def test_changing_the_number_of_workers_is_refused(group):
    with pytest.raises(UnsupportedError, match="Start a new one"):
        group.reinitialize_distributed(object())


# Profiling.


def test_each_rank_writes_its_trace(launcher, steps, tmp_path, world_size):
    group = launcher.ready(**{"plugins.dummy.trace_folder": str(tmp_path)})
    group.profile(True, "run", delay_iterations=1, max_iterations=1)
    group.start_profile("ignored, one is active")
    for plan in (steps.new(), steps.next(3, 1), steps.next(4, 2)):
        group.execute_model(plan)
    group.stop_profile()
    group.stop_profile()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"run-rank-{rank}.json" for rank in range(world_size)
    ]
    for path in tmp_path.iterdir():
        events = json.loads(path.read_text())["traceEvents"]
        assert [event["name"] for event in events] == ["step 2"]


def test_a_wrong_profile_argument_is_refused_before_anything_is_sent(group):
    before = group.collective_rpc("recorded_calls")
    for arguments in (
        ("../x",), ("",), (".x",), ("x", -1), ("x", True), ("x", 0, 0), ("x", 0, 1.5),
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError):
            group.profile(True, *arguments)
    assert group.collective_rpc("recorded_calls") == before


# Adapters.


def test_lora_adapters_are_kept_alike_on_every_rank(launcher):
    group = launcher.ready(max_loras=2)
    one, two, three = (LoRARequest(id=n, name=f"n{n}", path="p", digest="d") for n in (1, 2, 3))
    assert group.add_lora(one)
    assert group.add_lora(two)
    assert group.list_loras() == {1, 2}
    assert group.pin_lora(1)
    assert group.add_lora(three)
    assert group.list_loras() == {1, 3}
    assert group.pin_lora(3)
    with pytest.raises(RemoteError, match=r"no room for LoRA adapter 2: \[1, 3\] are pinned"):
        group.add_lora(two)
    assert group.remove_lora(1)
    assert not group.remove_lora(1)
    assert group.list_loras() == {3}
    with pytest.raises(RemoteError, match="LoRA adapter 9 is not loaded"):
        group.pin_lora(9)


def test_prompt_adapters_likewise(launcher):
    group = launcher.ready(max_prompt_adapters=1)
    adapter = PromptAdapterRequest(id=4, name="n", path="p", num_virtual_tokens=2)
    assert group.add_prompt_adapter(adapter)
    assert group.list_prompt_adapters() == {4}
    assert group.pin_prompt_adapter(4)
    assert group.remove_prompt_adapter(4)
    assert group.list_prompt_adapters() == frozenset()


def test_ranks_that_disagree_are_named(launcher, world_size):
    group = launcher.ready(max_loras=2)
    if world_size == 1:
        pytest.skip("one rank agrees with itself")

    def only_here(worker, request):
        return worker.rank != 1 or worker.add_lora(request)

    group.collective_rpc(only_here, args=(LoRARequest(id=1, name="n", path="p"),))
    with pytest.raises(DivergedError, match=r"rank 0: frozenset\(\), rank 1: frozenset\(\{1\}\)"):
        group.list_loras()


# Sleep.


def test_sleep_and_wake_by_tags(group, steps, world_size, caplog):
    tokens = group.execute_model(steps.new()).tokens
    reports = group.sleep(1)
    assert [report.bytes_backed_up for report in reports] == [4096] * world_size
    assert all(report.bytes_freed > 4096 and report.bytes_still_held == 0 for report in reports)
    assert group.sleeping_tags == {"weights", "kv_cache"}
    with caplog.at_level(logging.WARNING, logger="hardpoint"):
        assert group.sleep(1) == []
    assert "already asleep: kv_cache, weights" in caplog.text

    group.wake_up(["weights"])
    assert group.is_sleeping
    assert group.sleeping_tags == {"kv_cache"}
    with pytest.raises(SleepStateError, match=r"needs kv_cache awake.*wake_up\(tags=\['kv_cache"):
        group.execute_model(steps.next(3, 1))
    assert group.wake_up(["weights"]) == []
    group.wake_up()
    assert not group.is_sleeping
    assert group.execute_model(steps.new("b")).tokens == tokens


def test_level_two_needs_a_reload(group, steps):
    tokens = group.execute_model(steps.new()).tokens
    for cycle in range(3):
        group.sleep(2)
        with pytest.raises(SleepStateError, match="reload_weights needs weights in memory"):
            group.reload_weights()
        group.wake_up()
        assert not group.is_sleeping
        with pytest.raises(SleepStateError, match=r"weights undefined: reload_weights\(\) first"):
            group.execute_model(steps.empty())
        group.reload_weights()
        assert group.execute_model(steps.new(f"after {cycle}")).tokens == tokens


def test_a_deeper_sleep_of_what_sleeps_in_part_is_refused_not_ignored(group, steps):
    group.sleep(1)
    group.wake_up(["weights"])
    with pytest.raises(SleepStateError, match=r"kv_cache asleep.*or discard\(tags=\['weights"):
        group.sleep(2)
    assert group.sleeping_tags == {"kv_cache"}
    group.wake_up()
    assert group.execute_model(steps.new()).tokens


def test_discard_frees_one_tag(group, steps):
    group.discard(["kv_cache"])
    assert group.sleeping_tags == {"kv_cache"}
    group.wake_up(["kv_cache"])
    assert group.execute_model(steps.new()).tokens


def test_unknown_or_no_tags_are_refused_and_change_nothing(group):
    group.sleep(1)
    for tags in ([], ["weight"], "x", ["weights", "all"]):
        with pytest.raises(ValueError, match="tags must be some of weights, kv_cache"):
            group.wake_up(tags)
        assert group.sleeping_tags == {"weights", "kv_cache"}


def test_an_unknown_level_is_refused(group):
    for level in (0, 3, "1", None):
        with pytest.raises(ValueError, match="sleep level must be one of"):
            group.sleep(level)
        assert not group.is_sleeping


def test_workers_refuse_to_execute_asleep_on_their_own(group, steps):
    group.sleep(1)
    with pytest.raises(RemoteError, match="execute_model needs weights awake") as caught:
        group.collective_rpc("execute_model", args=(steps.empty(),))
    assert isinstance(caught.value.__cause__, SleepStateError)


def test_sleep_that_fails_on_one_rank_is_partial_until_woken(group, steps, world_size):
    def break_sleep(worker):
        if worker.rank == worker.context.world_size - 1:
            worker.memory.release = None

    def mend_sleep(worker):
        vars(worker.memory).pop("release", None)

    tokens = group.execute_model(steps.new()).tokens
    group.collective_rpc(break_sleep)
    with pytest.raises(RemoteError, match="'NoneType' object is not callable"):
        group.sleep(1)
    assert {state.value for state in group.sleep_state.state.values()} == {"partial"}
    with pytest.raises(SleepStateError, match=r"ranks differ; wake_up\(tags="):
        group.execute_model(steps.empty())
    group.collective_rpc(mend_sleep)
    group.wake_up()
    assert group.execute_model(steps.new("b")).tokens == tokens


# Capabilities.

CALLS = {
    Capability.LORA: lambda group: group.list_loras(),
    Capability.PROMPT_ADAPTERS: lambda group: group.list_prompt_adapters(),
    Capability.SLEEP: lambda group: group.sleep(1),
    Capability.WEIGHT_RELOAD: lambda group: group.reload_weights(),
    Capability.SHARDED_STATE: lambda group: group.save_sharded_state("x"),
    Capability.PROFILE: lambda group: group.start_profile(),
    Capability.MULTIMODAL: lambda group: group.reset_mm_cache(),
    Capability.DATA_PARALLEL: lambda group: group.execute_dummy_batch(),
    Capability.SPECULATIVE: lambda group: group.take_draft_token_ids(),
}
METHODS = {
    Capability.LORA: "list_loras",
    Capability.PROMPT_ADAPTERS: "list_prompt_adapters",
    Capability.WEIGHT_RELOAD: "reload_weights",
    Capability.PROFILE: "profile",
}


def offer_only(worker, offered):
    worker.platform.capabilities = offered


def test_what_a_platform_does_not_offer_is_refused_before_anything_is_sent(group):
    for capability, call in CALLS.items():
        offered = {**dict.fromkeys(Capability, YES), capability: NOT_YET}
        group.platform.capabilities = offered
        group.collective_rpc(offer_only, args=(offered,))
        before = group.collective_rpc("recorded_calls")
        with pytest.raises(UnsupportedError, match="platform 'dummy' does not support") as caught:
            call(group)
        assert caught.value.capability == capability.value
        assert group.collective_rpc("recorded_calls") == before
        if capability in METHODS:
            with pytest.raises(RemoteError) as remote:
                group.collective_rpc(METHODS[capability])
            assert isinstance(remote.value.__cause__, UnsupportedError)
