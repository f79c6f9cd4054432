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


@pytest.mark.parametrize("name", NAMES)
def test_no_record_was_written_by_hand(name):
    for level, told in json.loads(evidence.record_of(name).read_text()).items():
        assert told.get("seal") == evidence.seal(told), f"{name} {level}: record again"


@pytest.mark.parametrize(
    "claim", [{"failed": 0}, {"passed": 99}, {"tests": ["another"]}, {"digest": "another"}]
)
def test_a_seal_is_of_one_record(claim):
    told = {"tests": ["a"], "passed": 1, "failed": 1, "skipped": 0, "digest": "of a tree"}
    sealed = {**told, "seal": evidence.seal(told)}
    assert evidence.seal(sealed) == sealed["seal"] != evidence.seal({**sealed, **claim})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_was_recorded_is_of_this_tree(name):
    """In the slow lane: sources change daily, records take minutes."""
    levels = evidence.stale(name)
    way_out = " ".join(f"{name}:{level}" for level in levels)
    assert not levels, f"record again: python tests/support/evidence.py {way_out}"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree of one platform with one level, whose test's results are ``evidence.results``'s."""
    name, level = NAMES[0], "L0"
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.setattr(evidence, "EVIDENCE", {name: {level: ("tests/test_some.py::test_one",)}})
    folders = [each.format(name) for each in evidence.RESTS_ON[level]]
    for path in ("tests/test_some.py", *(f"{folder}/deep/some.py" for folder in folders)):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("1\n")
    monkeypatch.setattr(evidence, "results", lambda tests: {"tests": list(tests), "passed": 1})
    evidence.record_of(name).parent.mkdir(parents=True, exist_ok=True)
    return name, level


def test_a_record_is_stale_once_a_test_or_a_source_is_another(tree, monkeypatch):
    name, level = tree
    assert evidence.stale(name) == [level]
    evidence.main([])
    assert evidence.stale(name) == []
    for path in sorted(evidence.sources(name, level)):
        path.write_text("2\n")
        assert evidence.stale(name) == [level], path
        path.write_text("1\n")
    assert evidence.stale(name) == []
    added = evidence.ROOT / evidence.RESTS_ON[level][-1].format(name) / "another.py"
    added.touch()
    assert evidence.stale(name) == [level]
    added.unlink()
    monkeypatch.setattr(evidence, "EVIDENCE", {name: {level: ("tests/test_some.py",)}})
    assert evidence.stale(name) == [level]


def test_a_record_by_hand_is_stale(tree):
    name, level = tree
    evidence.main([])
    path = evidence.record_of(name)
    found = json.loads(path.read_text())
    found[level]["passed"] = 2
    path.write_text(json.dumps(found))
    assert evidence.stale(name) == [level]


def test_what_does_not_run_makes_no_record_stale(tree):
    name, level = tree
    evidence.main([])
    path = next(iter(evidence.sources(name, level)))
    path.write_text('"""A module."""\n\n# Nothing runs\n\n1  # here\n"""\nOf it.\n"""\n')
    assert evidence.stale(name) == []
    path.write_text('"#1"\nx = "# 2"\n')
    first = evidence.digest(name, level)
    path.write_text('x = "# 3"\n')
    assert evidence.digest(name, level) != first


def test_a_cut_leaves_what_was_recorded_before_it(tree, monkeypatch):
    name, level = tree
    levels = {level: ("tests/test_some.py",), "L2": ("tests/test_some.py::test_one",)}
    monkeypatch.setattr(evidence, "EVIDENCE", {name: levels})
    monkeypatch.setattr(evidence, "RESTS_ON", {level: ("plugins/{}/src",), "L2": ()})

    def results(tests):
        if "::" in tests[0]:
            raise KeyboardInterrupt
        return {"tests": list(tests), "passed": 7}

    monkeypatch.setattr(evidence, "results", results)
    with pytest.raises(KeyboardInterrupt):
        evidence.main([])
    assert json.loads(evidence.record_of(name).read_text())[level]["passed"] == 7
    assert evidence.stale(name) == ["L2"]
    assert [path.name for path in evidence.record_of(name).parent.iterdir() if path.is_file()] == [
        "support.json"
    ]


def test_tests_of_two_platforms_are_run_once(tree, monkeypatch):
    _, level = tree
    run = []
    names = ("one", "two")
    monkeypatch.setattr(evidence, "EVIDENCE", {n: {level: ("tests/test_some.py",)} for n in names})
    monkeypatch.setattr(evidence, "RESTS_ON", {level: ()})
    monkeypatch.setattr(evidence, "results", lambda tests: run.append(tests) or {"tests": [*tests]})
    for name in names:
        evidence.record_of(name).parent.mkdir(parents=True)
    evidence.main([])
    assert run == [("tests/test_some.py",)]
    assert not [level for name in names for level in evidence.stale(name)]


def test_nothing_is_recorded_of_sources_that_change_meanwhile(monkeypatch):
    told = iter(("before", "after"))
    monkeypatch.setattr(evidence, "digest", lambda name, level: next(told))
    monkeypatch.setattr(evidence, "results", lambda tests: {"tests": list(tests)})
    with pytest.raises(SystemExit, match="sources changed"):
        evidence.recorded("cuda", "L0", {})


def test_results_count_what_passed_failed_and_was_skipped(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k good")
    path = tmp_path / "test_some.py"
    path.write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "@pytest.mark.skip\n"
        "def test_left_out(): pass\n"
    )
    told = {"tests": [str(path)], "passed": 1, "failed": 1, "skipped": 1}
    assert evidence.results((str(path),)) == told
    left_out = tmp_path / "test_other.py"
    left_out.write_text("import pytest\npytest.importorskip('none_such')\n")
    both = (f"{path}::test_good", str(left_out))
    told = {"tests": [*both], "passed": 1, "failed": 1, "skipped": 1}
    assert evidence.results(both) == told, "a file of which nothing passed has failed"
    with pytest.raises(SystemExit, match="not all of"):
        evidence.results((f"{path}::test_gone",))
