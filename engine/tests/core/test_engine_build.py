"""From a configuration to an engine: what is decided, what is refused, and that nothing is left."""

from __future__ import annotations

import logging
import textwrap

import hardpoint_engine
import pytest
from hardpoint.config.loading import load_config
from hardpoint.errors import (
    ConfigError,
    HardpointError,
    MemoryBudgetError,
    PluginNotFoundError,
    RemoteError,
    UnsupportedError,
)
from hardpoint.registry import Registry
from hardpoint_engine.build import ENGINE_DEFAULT, start_engine


def test_an_unset_length_is_the_least_of_context_and_cache(engine, caplog):
    with caplog.at_level(logging.INFO, "hardpoint.engine"):
        small = engine(num_kv_blocks=9, block_size=8)
    assert small.core.max_model_len == small.core.config.model.max_model_len == 64
    assert small.core.config.origins["max_model_len"] == ENGINE_DEFAULT
    assert small.calls("update_max_model_len") == [64]
    assert "max_model_len = 64, as long as the KV cache allows (context 4096" in caplog.text
    large = engine(num_kv_blocks=None)
    assert large.core.max_model_len == large.core.description.context_length == 4096
    assert large.calls("update_max_model_len") == []
    assert large.calls("determine_available_memory") == [None]
    assert small.calls("determine_available_memory") == []


def test_a_request_as_long_as_the_cache_runs_to_its_end(engine):
    one = engine(num_kv_blocks=9, block_size=8)
    assert len(one.ask((1,), max_tokens=None)) == 63
    assert len(one.ask((1,) * 63, max_tokens=None)) == 1


def test_an_explicit_length_is_kept(engine):
    one = engine(max_model_len=20)
    assert one.core.max_model_len == 20
    assert one.core.config.origins["max_model_len"] != ENGINE_DEFAULT
    assert len(one.ask((1, 2), max_tokens=None)) == 18


def test_memory_decides_where_no_number_is_given(engine):
    one = engine(num_kv_blocks=None, kv_cache_memory_bytes=100_000)
    block = sum(tensor.num_bytes for tensor in one.core.kv_plan.configs[0].tensors)
    block //= one.core.kv_plan.num_blocks
    assert one.core.kv_plan.num_blocks == 100_000 // block
    assert one.calls("determine_available_memory") == []


def test_a_platform_without_chunks_gets_whole_prompts(engine, monkeypatch):
    from hardpoint.capabilities import NOT_YET, Capability
    from hardpoint_dummy.platform import DummyPlatform

    lacking = {**DummyPlatform.capabilities, Capability.CHUNKED_PREFILL: NOT_YET}
    monkeypatch.setattr(DummyPlatform, "capabilities", lacking)
    one = engine(max_model_len=40, max_num_batched_tokens=40)
    for n in range(5):
        one.add(f"r{n}", tuple(range(n, n + 30)), max_tokens=10)
    one.run()
    assert {end.finish_reason for end in one.ends.values()} == {"length"}
    assert not one.core.scheduler.limits.chunked


REFUSED = [
    ({"max_model_len": 261}, MemoryBudgetError, "max_model_len = 261"),
    ({"max_model_len": 5000}, ConfigError, "max_model_len = 5000"),
    ({"num_kv_blocks": None, "kv_cache_memory_bytes": 10}, MemoryBudgetError, "10 bytes avail"),
    ({"num_kv_blocks": None, "dummy": {"memory_bytes": 5000}}, MemoryBudgetError, "no room"),
    ({"num_speculative_tokens": 2}, UnsupportedError, "hardpoint-engine.*speculative"),
    ({"data_parallel_size": 2}, UnsupportedError, "hardpoint-engine.*data parallelism"),
    ({"admission": "fair"}, PluginNotFoundError, "admission = 'fair'"),
    ({"platform": "dumy"}, PluginNotFoundError, "dummy"),
    ({"executor": "unii"}, PluginNotFoundError, "uni"),
    ({"model": "/nowhere", "load_format": "auto"}, HardpointError, "/nowhere"),
    ({"load_format": "auto"}, ConfigError, "no model is named"),
    ({"dummy": {"fail_at": "load"}}, RemoteError, "DummyFault"),
    ({"dummy": {"fail_at": "warm_up"}}, RemoteError, "DummyFault"),
]


@pytest.mark.parametrize(
    ("keys", "error", "message"), REFUSED, ids=[str(case[0]) for case in REFUSED]
)
def test_what_cannot_start_says_why_and_leaves_nothing(
    engine, threads_of_workers, keys, error, message
):
    with pytest.raises(error, match=message):
        engine(**keys)
    assert not threads_of_workers()


def test_nothing_starts_before_everything_is_checked(engine, monkeypatch):
    from hardpoint_uniproc.executor import UniProcExecutor

    started = []

    def note(executor):
        started.append(executor)

    monkeypatch.setattr(UniProcExecutor, "start_workers", note)
    for keys in ({"admission": "fair"}, {"data_parallel_size": 2}, {"max_num_seqs": 0}):
        with pytest.raises(HardpointError):
            engine(**keys)
    assert not started


POLICY = """
from hardpoint.hookspecs import hookimpl
from hardpoint.records import ExtensionRecord, Offer
from hardpoint_engine import AdmissionPolicy, Admit, Refuse, Wait

class Pairs(AdmissionPolicy):
    def __init__(self):
        self.seen = []

    def admit(self, request, running):
        if request.num_prompt > 50:
            return Refuse("too long for pairs")
        return Admit() if len(running) < 2 else Wait()

    def observe(self, output):
        self.seen.append(output)
        if output.finish_reason == "error":
            raise ZeroDivisionError

@hookimpl
def hardpoint_extension():
    return ExtensionRecord(name="pairing", api=(2, 0))

@hookimpl
def hardpoint_scheduling():
    return [Offer(name="pairs", reference="{module}:Pairs")]
"""


@pytest.fixture
def pairing(tmp_path, monkeypatch):
    """An installed extension that offers an admission policy."""
    module = "pairing_extension"
    (tmp_path / f"{module}.py").write_text(textwrap.dedent(POLICY).format(module=module))
    info = tmp_path / "pairing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pairing\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[hardpoint.extensions]\npairing = {module}\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_an_extensions_policy_is_asked_and_sees_the_results(engine, pairing, caplog):
    one = engine(admission="pairs")
    policy = one.core.scheduler.admission
    one.add("long", (1,) * 60)
    for n in range(5):
        one.add(f"r{n}", (1, 2, n), max_tokens=3)
    most = 0
    while one.core.has_unfinished():
        one.step()
        most = max(most, one.core.metrics.gauges.running)
    assert most == 2
    assert "turned away: too long for pairs" in str(one.ends["long"].error)
    assert policy.seen == one.outputs
    assert "policy Pairs raised in observe" in caplog.text
    assert [one.ends[f"r{n}"].finish_reason for n in range(5)] == ["length"] * 5


def test_a_policy_that_lets_nothing_run_is_named_once(engine, pairing, caplog, monkeypatch):
    monkeypatch.setattr("hardpoint_engine.idling.WAITING_SECONDS", 0.01)
    one = engine(admission="pairs")
    policy = type(one.core.scheduler.admission)
    monkeypatch.setattr(policy, "admit", lambda *_: hardpoint_engine.Wait())
    one.add("a", (1, 2, 3))
    one.add("b", (1, 2, 3))
    for _ in range(40):
        assert one.core.step() == []
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "2 requests wait" in said
    assert "Pairs lets none of them start" in said


def test_a_misspelt_policy_gets_its_close_matches(pairing, threads_of_workers):
    keys = {"platform": "dummy", "load_format": "dummy", "admission": "pears"}
    config = load_config(overrides=keys, environ={})
    with pytest.raises(PluginNotFoundError, match=r"mean 'pairs'\? Offered are: pairs"):
        start_engine(config, registry=Registry.discover(config))


def test_when_the_policy_lets_nobody_run_a_step_gives_nothing(engine, pairing, monkeypatch):
    one = engine(admission="pairs")
    policy = one.core.scheduler.admission
    from hardpoint_engine.scheduling.admission import Admit, Wait

    decision = Wait()
    monkeypatch.setattr(type(policy), "admit", lambda *_: decision)
    one.add("a", (1, 2))
    assert one.step() == []
    assert one.core.has_unfinished()
    decision = Admit()
    one.run()
    assert one.ends["a"].finish_reason == "length"
