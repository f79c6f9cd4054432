"""The devices of its node that a worker has are those that Ray gave it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_platform_reads_its_devices_off_what_ray_gave():
    script = Path(__file__).with_name("ray_devices.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert sorted(each for given, _ in found for each in given) == ["0", "1", "2", "3"]
    assert [devices for _, devices in found] == [["0", "1"]] * 2  # under its process's own mask
