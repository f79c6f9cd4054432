from __future__ import annotations

import pytest
import torch
from hardpoint.config.schema import ObservabilityConfig
from hardpoint.errors import CancelledStepError, LifecycleError, UnsupportedError
from hardpoint.messages import GrammarOutput, MessageError, SchedulerOutput, StepTicket
from hardpoint.records import Offer
from hardpoint.sampling_params import SamplingParams
from hardpoint_runtime.batch.columns import Column
from hardpoint_runtime.forward_context import current
from hardpoint_runtime.model_runner import TorchModelRunner

OFFERED = Column(
    name="acme.mode", dtype="int32", default=-1, pad=-1, read=lambda new: new.extra.get("acme")
)


def test_the_output_names_the_batch_s_order(make_runner, make_driver):
    driver = make_driver(make_runner())
    driver.add("long", range(1, 9))
    driver.add("other", range(20, 25))
    output = driver.step({"long": 8})
    assert (output.step_id, output.req_ids) == (1, ("long",))
    output = driver.step({"other": 3, "long": 1})
    assert output.req_ids == ("long", "other")  # decode first
    assert [len(tokens) for tokens in output.tokens] == [1, 0]  # an unfinished prompt: none
    assert output.timings.forward > 0


def test_a_step_without_tokens(make_runner, make_driver):
    driver = make_driver(make_runner())
    driver.add("a", [1, 2, 3])
    driver.step({"a": 3})
    driver.finish("a")
    output = driver.step({})
    assert (output.req_ids, output.tokens) == ((), ())
    assert len(driver.runner.requests) == 0


def test_work_is_done_in_the_documented_order(make_runner, make_driver, monkeypatch):
    runner = make_runner()
    driver = make_driver(runner)
    driver.add("a", [1, 2, 3])
    driver.add("b", [1, 2, 3])
    driver.step({"a": 3, "b": 3})
    driver.finish("a")
    driver.preempt("b")
    driver.add("c", [4])
    calls: list[str] = []

    def spy(owner, name):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for name in ("forget", "park", "check", "add", "update", "append_token"):
        spy(runner.requests, name)
    spy(runner.kv_cache, "zero_blocks")
    spy(runner.kv_cache, "copy_blocks")
    for name in ("prepare", "build_attention", "forward", "finish"):
        spy(runner, name)
    spy(runner.sampler, "sample")
    driver.step({"c": 1, "b": 4})
    assert calls == [
        "forget", "park", "check", "zero_blocks", "copy_blocks", "add", "update", "prepare",
        "forward", "build_attention", "finish", "sample", "append_token", "append_token",
    ]  # fmt: skip


def test_blocks_are_zeroed_then_copied_then_computed(make_runner, make_driver):
    runner = make_runner()
    driver = make_driver(runner)
    caches = list(runner.kv_cache.layers.values())
    for cache in caches:
        cache.key.fill_(torch.nan)
        cache.value.fill_(torch.nan)
        cache.key[50], cache.value[50] = 5.0, 6.0
    plan = SchedulerOutput(
        step_id=1, blocks_to_zero=(60, 61, 62), block_copies=((0, 50, 60), (0, 61, 70))
    )
    runner.execute_model(plan)
    for cache in caches:
        assert (cache.key[60] == 5.0).all()
        assert (cache.value[60] == 6.0).all()
        assert (cache.key[[61, 62, 70]] == 0).all()
        assert cache.key[63].isnan().all()
    driver.add("a", range(1, 11))
    clean = make_driver(make_runner())
    clean.add("a", range(1, 11))
    assert driver.run(6) == clean.run(6)  # what other blocks hold does not matter


def test_sampling_can_wait(make_runner, make_driver):
    direct, waiting = make_driver(make_runner()), make_driver(make_runner())
    for driver in (direct, waiting):
        driver.add("a", [1, 2, 3], SamplingParams(seed=4))
    for count in (2, 1, 1, 1):
        direct.step({"a": count})
        plan = waiting.plan({"a": count}, defer_sampling=True)
        ticket = waiting.runner.execute_model(plan)
        assert ticket == StepTicket(step_id=plan.step_id)
        waiting.take(plan, waiting.runner.sample_tokens(ticket, None))
    assert waiting.output("a") == direct.output("a")
    assert len(direct.output("a")) == 3


def test_a_waiting_step_takes_its_grammar(make_runner, make_driver):
    driver = make_driver(make_runner())
    driver.add("a", [1, 2, 3])
    driver.add("b", [4, 5])
    plan = driver.plan({"a": 3, "b": 2}, defer_sampling=True)
    ticket = driver.runner.execute_model(plan)
    bits = bytearray(16)
    bits[96 // 8] = 1
    output = driver.runner.sample_tokens(
        ticket, GrammarOutput(req_ids=("b",), masks=((bytes(bits),),))
    )
    assert dict(zip(output.req_ids, output.tokens, strict=True))["b"] == (96,)


def test_only_the_waiting_step_can_be_sampled_and_once(make_runner, make_driver):
    driver = make_driver(make_runner())
    driver.add("a", [1, 2, 3])
    ticket = driver.runner.execute_model(driver.plan({"a": 3}, defer_sampling=True))
    with pytest.raises(LifecycleError, match=r"step 9 does not wait .* \(waiting: step 1\)"):
        driver.runner.sample_tokens(StepTicket(step_id=9), None)
    with pytest.raises(LifecycleError, match="step 1 does not wait"):
        driver.runner.sample_tokens(StepTicket(step_id=1, generation=5), None)
    driver.runner.sample_tokens(ticket, None)
    with pytest.raises(LifecycleError, match=r"\(waiting: none\)"):
        driver.runner.sample_tokens(ticket, None)


def test_a_waiting_step_is_left_only_when_its_requests_are_gone(make_runner, make_driver):
    driver = make_driver(make_runner())
    driver.add("a", [1, 2, 3])
    driver.add("b", [1, 2, 3])
    driver.runner.execute_model(driver.plan({"a": 3}, defer_sampling=True))
    with pytest.raises(
        LifecycleError, match=r"step 1 waits for sample_tokens \(requests \['a'\]\)"
    ):
        driver.runner.execute_model(driver.plan({"b": 3}))
    driver.known.discard("b")
    driver.finish("a")
    driver.preempt("b")
    driver.parked.discard("b")
    driver.step({"b": 3})
    assert len(driver.output("b")) == 1


def test_an_empty_deferred_step_is_sampled_too(make_runner):
    runner = make_runner()
    ticket = runner.execute_model(SchedulerOutput(step_id=3, defer_sampling=True))
    assert runner.sample_tokens(ticket, None).req_ids == ()


def test_a_failed_forward_leaves_a_runner_that_goes_on(make_runner, make_driver):
    cancelled = []
    runner = make_runner(cancelled=lambda: bool(cancelled))
    driver, clean = make_driver(runner), make_driver(make_runner())
    for each in (driver, clean):
        each.add("a", [1, 2, 3])
    driver.step({"a": 3})
    cancelled.append(True)
    driver.add("b", [7, 8])
    with pytest.raises(CancelledStepError, match="step 2"):
        driver.step({"b": 2})
    cancelled.clear()
    driver.finish("b")
    driver.run(5)
    assert driver.output("a") == clean.run(5)["a"]


def test_drafts_are_refused(make_runner, make_driver):
    driver = make_driver(make_runner())
    driver.add("a", [1, 2, 3])
    plan = driver.plan({"a": 3}, drafts={"a": (5,)})
    with pytest.raises(UnsupportedError, match="'host' does not support speculative decoding"):
        driver.runner.execute_model(plan)


def test_a_plan_that_contradicts_itself_is_refused(make_runner):
    with pytest.raises(MessageError, match="step 1: total_tokens 3"):
        make_runner().execute_model(SchedulerOutput(step_id=1, total_tokens=3))


def test_extra_reaches_the_layers_and_the_request(make_runner, make_driver, monkeypatch):
    runner = make_runner()
    driver = make_driver(runner)
    driver.add("a", [1, 2, 3])
    seen = []
    forward = type(runner.model).forward
    monkeypatch.setattr(
        type(runner.model),
        "forward",
        lambda self, ids, at, step, rows: (
            seen.append((step.extra, step.step_id)) or forward(self, ids, at, step, rows)
        ),
    )
    mine = object()
    driver.step({"a": 3}, extra={"acme": mine})
    assert seen == [({"host": "constant", "acme": mine}, 1)]


def test_batches_are_timed_only_where_it_is_asked_for(
    make_runner, make_driver, monkeypatch, caplog
):
    def waits(**more):
        runner = make_runner(**more)
        driver = make_driver(runner)
        driver.add("a", [1, 2, 3])
        counted = []
        monkeypatch.setattr(runner.device, "synchronize", lambda: counted.append(1))
        caplog.clear()
        for tokens in (3, 1, 1):
            driver.step({"a": tokens})
        told = [each.getMessage() for each in caplog.records if each.name == "hardpoint.batches"]
        return len(counted), told

    assert waits() == (0, [])
    timed = ObservabilityConfig(batch_timing_interval=1e-9)
    count, told = waits(observability=timed)
    assert count == 6
    assert [line.partition(": ")[2][:11] for line in told] == [
        "3 tokens: 1", "1 tokens: 1", "1 tokens: 1",
    ]  # fmt: skip


def test_layers_find_one_another_by_name(make_runner, make_driver, monkeypatch):
    runner = make_runner()
    seen = []
    layer = type(runner.model.layers[0])
    forward = layer.forward

    def spy(self, *args):
        seen.append(current().layers["layers.1.input_norm"])
        return forward(self, *args)

    monkeypatch.setattr(layer, "forward", spy)
    for run in (runner.warm_up, runner.profile_run):
        seen.clear()
        run()
        assert set(seen) == {runner.model.layers[1].input_norm}
    driver = make_driver(runner)
    driver.add("a", [1, 2, 3])
    seen.clear()
    driver.step({"a": 3})
    assert set(seen) == {runner.model.layers[1].input_norm}


def test_a_plugin_s_column_is_declared_filled_and_forgotten(make_runner, registry):
    from hardpoint.messages import NewRequestData

    offer = Offer(name="acme.mode", reference=f"{__name__}:OFFERED")
    registry.given["hardpoint_batch_columns"] = [offer]
    runner = make_runner(registry=registry)
    request = NewRequestData(
        req_id="a",
        prompt=(1, 2),
        sampling=SamplingParams(temperature=0),
        block_ids=((1,),),
        extra={"acme": 42},
    )
    plan = SchedulerOutput(step_id=1, new=(request,), num_tokens={"a": 2}, total_tokens=2)
    runner.execute_model(plan)
    assert runner.requests.columns["acme.mode"].tolist() == [42] + [-1] * 7
    runner.execute_model(SchedulerOutput(step_id=2, finished=frozenset({"a"})))
    assert runner.requests.columns["acme.mode"].tolist() == [-1] * 8


def test_methods_out_of_order_name_what_is_missing(make_context, platform, registry, device_class):
    runner = TorchModelRunner(make_context(), platform, registry, device_class())
    with pytest.raises(LifecycleError, match="get_model was called before load_model"):
        runner.get_model()
    with pytest.raises(LifecycleError, match="execute_model was called before initialize_kv_cache"):
        runner.execute_model(SchedulerOutput(step_id=1))
    with pytest.raises(LifecycleError, match="warm_up was called before initialize_kv_cache"):
        runner.warm_up()


def test_a_fitted_length_is_adopted(make_runner, make_driver):
    runner = make_runner()
    runner.update_max_model_len(8)
    driver = make_driver(runner)
    driver.add("a", range(1, 10))
    with pytest.raises(MessageError, match="request 'a' has 9 tokens, the longest here is 8"):
        driver.step({"a": 9})
    driver.finish("a")
    driver.add("b", range(1, 9))
    driver.step({"b": 8})  # its next token is drawn, and has no place any more
    assert len(driver.output("b")) == 1


def test_a_request_whose_logits_are_no_numbers_is_counted_by_name(make_runner, make_driver):
    class Spoilt(TorchModelRunner):
        spoilt = False

        def forward(self, inputs, plan):
            logits = super().forward(inputs, plan)
            if self.spoilt:
                logits[inputs.sampled_ids.index("b"), :3] = torch.nan
            return logits

    outputs = {}
    for spoilt in (False, True):
        driver = make_driver(make_runner(Spoilt))
        driver.add("unfinished", range(1, 9))
        driver.add("a", [1, 2, 3])
        driver.add("b", [4, 5], SamplingParams(seed=1, top_p=0.5))
        driver.add("c", [6], SamplingParams(seed=2))
        driver.runner.spoilt = spoilt
        outputs[spoilt] = driver.step({"unfinished": 3, "a": 3, "b": 2, "c": 1})
    clean, counted = outputs[False], outputs[True]
    assert (clean.nan_counts, counted.nan_counts) == ({}, {"b": 3})
    for req_id, before, after in zip(clean.req_ids, clean.tokens, counted.tokens, strict=True):
        assert after == ((0,) if req_id == "b" else before)
