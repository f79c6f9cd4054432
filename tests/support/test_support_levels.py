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
def test_what_was_recorded_is_of_the_tests_that_are_named_and_there(name):
    recorded = json.loads(evidence.record_of(name).read_text())
    wanted = {level: list(tests) for level, tests in evidence.EVIDENCE[name].items()}
    assert "L0" in recorded
    assert {level: told["tests"] for level, told in recorded.items()}.items() <= wanted.items()
    for tests in wanted.values():
        for test in tests:
            assert (evidence.ROOT / test.partition("::")[0]).is_file(), test


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
