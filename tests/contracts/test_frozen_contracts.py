"""The contracts are what was frozen under their number, and what breaks a plugin is told apart from
what adds to them.
"""

from __future__ import annotations

import json
import re

import freeze
import pytest
from attrs import evolve
from compare import compared
from describe import described, number
from promises import PROMISES

NOW = described()


def test_no_plugin_of_a_number_that_is_served_would_break():
    """Of this major number; ``python tests/contracts/freeze.py`` records additions."""
    served = freeze.of_major(number().partition(".")[0])
    assert number() in served, f"no {number()}.json: run python tests/contracts/freeze.py"
    for name in served:
        freeze.since(name, NOW)


def test_all_that_was_added_is_recorded():
    document = freeze.read(number())
    recorded = document["contracts"] | document["added"]
    missing = {name: line for name, line in NOW.items() if recorded.get(name) != line}
    gone = sorted(recorded.keys() - NOW.keys())
    shown = [*(f"{name}: {line}" for name, line in missing.items()), *gone]
    assert not shown, "\n".join(["not as recorded:", *shown, freeze.RECORD])


@pytest.mark.parametrize(
    "name",
    [
        "hardpoint.hookspecs.hardpoint_configure",
        "hardpoint.messages.SchedulerOutput.num_tokens",
        "hardpoint.platform.Platform.check",
        "hardpoint.executor.Executor.collective_rpc",
        "hardpoint.capabilities.Capability.LORA",
        "hardpoint.sampling_params.SamplingParams.top_k",
        "hardpoint.rpc.host.WorkerHost()",
        "hardpoint.rpc.calls.CallTable.deliver",
        "hardpoint.executor.Executor.calls",
        "hardpoint.hookspecs.hookimpl",
        "hardpoint.capabilities.NOT_YET",
        "hardpoint.worker.Worker.config",
        "hardpoint.errors.WorkerDiedError()",
        "hardpoint.config.schema.CacheConfig.block_size",
    ],
)
def test_what_plugins_are_built_on_is_in_it(name):
    assert name in NOW
    assert not [line for line in NOW.values() if " at 0x" in line]


@pytest.mark.parametrize("name", PROMISES)
def test_no_user_of_the_other_promises_would_break(name):
    """Toolkit, engine and kit have numbers of their own; additions need no record."""
    freeze.promised(name)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("toolkit", "hardpoint_runtime.model_runner.TorchModelRunner.make_sampler"),
        ("toolkit", "hardpoint_runtime.device.DeviceOps.allocate"),
        ("engine", "hardpoint_engine.AdmissionPolicy.admit"),
        ("kit", "hardpoint_conformance.Probe.held_bytes"),
        ("kit", "hardpoint_conformance.Suite.of"),
    ],
)
def test_what_breaks_another_promise_is_told(monkeypatch, name, broken):
    now = PROMISES[name].described()
    now[broken] = now[broken].replace("(", "(more: int, ").replace(", )", ")")
    promise = evolve(PROMISES[name], described=lambda: now)
    monkeypatch.setattr(freeze, "PROMISES", {name: promise})
    with pytest.raises(freeze.Broken, match=f"{re.escape(broken)} was(?s:.*)is frozen under its"):
        freeze.promised(name)


BEFORE = {
    "m.hardpoint_x": "hook (config: Config) -> str | None",
    "m.R": "record of object",
    "m.R.a": "field int",
    "m.R.b": "field int = 1",
    "hardpoint.worker.Worker": "class of ABC",
    "hardpoint.worker.Worker.sleep": "method (level: int) -> SleepReport",
    "m.Executor": "class of ABC",
    "m.Executor.call": "method (name: str, *, args: tuple = ()) -> Any",
    "m.Executor.go": "abstract method () -> None",
    "m.Capability": "enumeration",
    "m.Capability.A": "member 'a', since 2.0",
}
BREAKS = {
    "a field is gone": {"m.R.b": None},
    "a field has another type": {"m.R.a": "field float"},
    "a default is another": {"m.R.b": "field int = 2"},
    "a new field has no default": {"m.R.c": "field int"},
    "a hook lost an argument": {"m.hardpoint_x": "hook () -> str | None"},
    "a hook returns something else": {"m.hardpoint_x": "hook (config: Config) -> str"},
    "a new method must be implemented": {"m.Executor.more": "abstract method () -> None"},
    "a method must be implemented now": {
        "m.Executor.call": "abstract method (name: str, *, args: tuple = ()) -> Any"
    },
    "what core calls in plugins gets one more": {
        "hardpoint.worker.Worker.sleep": "method (level: int, tags: str = '') -> SleepReport"
    },
    "what backends implement gets one more": {
        "m.Executor.go": "abstract method (x: int = 1) -> None"
    },
    "an argument is renamed": {
        "m.Executor.call": "method (method: str, *, args: tuple = ()) -> Any"
    },
    "an argument is needed": {
        "m.Executor.call": "method (name: str, x: int, *, args: tuple = ()) -> Any"
    },
    "an argument stands before another": {
        "m.Executor.call": "method (x: int = 1, name: str = '', *, args: tuple = ()) -> Any"
    },
    "a constructor that needs something": {"m.Executor()": "constructor (x: int, *, y: int = 1)"},
    "a capability has another name": {"m.Capability.A": "member 'b', since 2.0"},
    "a capability of a number that is out": {"m.Capability.B": "member 'b', since 2.0"},
}
ADDITIONS = {
    "a field with a default": {"m.R.c": "field int = 0"},
    "a hook": {"m.hardpoint_y": "hook () -> None"},
    "an argument of a hook": {"m.hardpoint_x": "hook (config: Config, rank: int) -> str | None"},
    "a method with a default": {"hardpoint.worker.Worker.more": "method () -> None"},
    "a record": {"m.S": "record of object", "m.S.a": "field int"},
    "an argument with a default": {
        "m.Executor.call": "method (name: str, x: int = 1, *, args: tuple = (), y: int = 2)"
        " -> Any"
    },
    "a constructor that needs nothing": {"m.Executor()": "constructor (*x: int, y: int = 1)"},
    "a constructor of a new class": {"m.S": "class of object", "m.S()": "constructor (x: int)"},
    "a capability of the next number": {"m.Capability.B": "member 'b', since 2.1"},
}  # fmt: skip


def changed(changes):
    now = {**BEFORE, **{name: line for name, line in changes.items() if line is not None}}
    return {name: line for name, line in now.items() if changes.get(name, line) is not None}


@pytest.mark.parametrize("what", BREAKS)
def test_what_breaks_a_plugin_is_told(what):
    found = compared(BEFORE, changed(BREAKS[what]), "2.0")
    assert len(found.breaks) == 1
    assert next(iter(BREAKS[what])) in found.breaks[0]
    assert not found.added


@pytest.mark.parametrize("what", ADDITIONS)
def test_what_adds_breaks_nothing(what):
    found = compared(BEFORE, changed(ADDITIONS[what]), "2.0")
    assert not found.breaks
    assert found.added == ADDITIONS[what]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The command writes into a folder of its own, of contracts that a test decides."""
    code = {"number": "2.0", "now": dict(BEFORE)}
    monkeypatch.setattr(freeze, "HERE", tmp_path)
    monkeypatch.setattr(freeze, "ROOT", tmp_path)
    monkeypatch.setattr(freeze, "number", lambda: code["number"])
    monkeypatch.setattr(freeze, "described", lambda: code["now"])
    (tmp_path / "docs").mkdir()
    return code


def test_the_command_records_additions_and_refuses_breaks(elsewhere):
    freeze.freeze()
    elsewhere["now"] = changed(ADDITIONS["a hook"])
    assert "1 added" in freeze.freeze()
    assert freeze.read("2.0")["added"] == ADDITIONS["a hook"]
    frozen = freeze.file_of("2.0").read_text()
    elsewhere["now"] = changed(BREAKS["a field is gone"])
    with pytest.raises(freeze.Broken, match=r"m\.R\.b is gone(?s:.*)Undo it(?s:.*)to \(3, 0\)"):
        freeze.freeze()
    assert freeze.file_of("2.0").read_text() == frozen


def test_a_new_number_freezes_anew(elsewhere):
    freeze.freeze()
    elsewhere |= {"number": "2.1", "now": changed(ADDITIONS["a hook"])}
    freeze.freeze()
    assert freeze.of_major("2") == ["2.0", "2.1"]
    assert freeze.read("2.1") == {"number": "2.1", "contracts": elsewhere["now"], "added": {}}
    elsewhere |= {"number": "3.0", "now": changed(BREAKS["a field is gone"])}
    with pytest.raises(freeze.Broken, match=r"migrating-to-3\.md is not there"):
        freeze.freeze()
    (freeze.ROOT / "docs" / "migrating-to-3.md").touch()
    freeze.freeze()
    assert json.loads(freeze.file_of("3.0").read_text())["contracts"] == elsewhere["now"]
