"""Metrics of steps, read where Ray exports them. Needs ``ray[default]``, which the slow tests have
in a folder of its own: with it, each Ray starts an agent more.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

APART = Path(sys.prefix) / "metrics"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not APART.is_dir() and find_spec("opencensus") is None,
        reason=f"ray[default] is neither installed nor in {APART}: make test-slow puts it there",
    ),
]


@pytest.mark.parametrize("executor", ["ray", "ray_legacy"])
def test_what_is_counted_is_exported_by_ray(executor):
    path = [str(APART), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ray_metrics.py")), executor],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "RAY_metrics_report_interval_ms": "1000",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    steps, listening, failed = [
        json.loads(line) for line in done.stdout.splitlines() if line[0] == "{"
    ]
    assert value_of(steps, "steps") == 3
    assert value_of(steps, "tokens", kind="computed") == 9
    assert value_of(steps, "tokens", kind="sampled") == 3
    assert value_of(steps, "step_seconds_count") == 3
    assert 0 < value_of(steps, "step_seconds_sum") < 600
    assert set(listening["addresses"]) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert value_of(failed, "failures") == 1


def value_of(found, name, **labels):
    """Return the one sample of this name and labels; a counter may be named as one."""
    wanted = {
        key: value
        for key, value in found.items()
        if re.fullmatch(rf"ray_hardpoint_{name}(_total)?\{{.*\}}", key)
        and all(f'{label}="{text}"' in key for label, text in labels.items())
    }
    (value,) = wanted.values()
    return value
