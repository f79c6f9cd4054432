"""No platform of GPUs claims more than its tests have shown."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from hardpoint.references import resolve
from hardpoint_runtime.accelerator.support import Evidence, earned, read_evidence

SPEC = importlib.util.spec_from_file_location("evidence", Path(__file__).with_name("evidence.py"))
evidence = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(evidence)
NAMES = sorted(evidence.EVIDENCE)


def shown(passed=1, failed=0):
    return Evidence(tests=("a",), passed=passed, failed=failed)


@pytest.mark.parametrize(
    ("found", "level"),
    [
        ({}, "none"),
        ({"L0": shown()}, "L0"),
        ({"L0": shown(), "L1": shown()}, "L1"),
        ({"L0": shown(), "L1": shown(failed=1)}, "L0"),
        ({"L0": shown(), "L1": shown(passed=0)}, "L0"),
        ({"L0": shown(), "L2": shown()}, "L0"),
        ({"L0": shown(failed=1), "L1": shown()}, "none"),
    ],
)
def test_a_level_is_earned_with_all_below_it(found, level):
    assert earned(found) == level


@pytest.mark.parametrize("name", NAMES)
def test_a_platform_says_what_was_recorded(name):
    platform = resolve(f"hardpoint_{name}.platform:{name.capitalize()}Platform")
    assert platform.support_level == earned(read_evidence(f"hardpoint_{name}"))
    assert platform.support_level in ("L0", "L1", "L2"), "no such device was ever at hand"


@pytest.mark.parametrize("name", NAMES)
def test_what_was_recorded_are_levels_of_tests_that_are_there(name):
    recorded = json.loads(evidence.record_of(name).read_text())
    assert {"L0"} <= recorded.keys() <= evidence.EVIDENCE[name].keys()
    named = [*recorded.values(), *({"tests": each} for each in evidence.EVIDENCE[name].values())]
    for test in (test for told in named for test in told["tests"]):
        assert (evidence.ROOT / test.partition("::")[0]).is_file(), test


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_was_recorded_is_of_this_tree(name):
    """In the slow lane: sources change daily, records take minutes."""
    levels = evidence.stale(name)
    way_out = " ".join(f"{name}:{level}" for level in levels)
    assert not levels, f"record again: python tests/support/evidence.py {way_out}"


def test_a_record_is_stale_once_a_test_or_a_source_is_another(tmp_path, monkeypatch):
    name, level = NAMES[0], "L0"
    folders = [each.format(name) for each in evidence.RESTS_ON[level]]
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.setattr(evidence, "EVIDENCE", {name: {level: ("tests/test_some.py::test_one",)}})
    for path in ("tests/test_some.py", *(f"{folder}/deep/some.py" for folder in folders)):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("1\n")
    monkeypatch.setattr(evidence, "results", lambda tests: {"tests": list(tests), "passed": 1})
    evidence.record_of(name).parent.mkdir(parents=True, exist_ok=True)
    evidence.main([name])
    assert evidence.stale(name) == []
    for path in sorted(evidence.sources(name, level)):
        path.write_text("2\n")
        assert evidence.stale(name) == [level], path
        path.write_text("1\n")
    assert evidence.stale(name) == []
    added = tmp_path / folders[-1] / "another.py"
    added.touch()
    assert evidence.stale(name) == [level]
    added.unlink()
    monkeypatch.setattr(evidence, "EVIDENCE", {name: {level: ("tests/test_some.py",)}})
    assert evidence.stale(name) == [level]


def test_nothing_is_recorded_of_sources_that_change_meanwhile(monkeypatch):
    told = iter(("before", "after"))
    monkeypatch.setattr(evidence, "digest", lambda name, level: next(told))
    monkeypatch.setattr(evidence, "results", lambda tests: {"tests": list(tests)})
    with pytest.raises(SystemExit, match="sources changed"):
        evidence.recorded("cuda", "L0")


def test_results_count_what_passed_and_failed(tmp_path):
    path = tmp_path / "test_some.py"
    path.write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "@pytest.mark.skip\n"
        "def test_left_out(): pass\n"
    )
    assert evidence.results((str(path),)) == {"tests": [str(path)], "passed": 1, "failed": 1}
