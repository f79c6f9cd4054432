"""Starting workers of accelerators: what is imported before they are forked, and who may fork."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
from hardpoint_runtime.accelerator.start_safety import fork_safety

PRELOADED = ("torch", "hardpoint_runtime.accelerator.worker",
             "hardpoint_runtime.accelerator.model_runner")  # fmt: skip


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_device_that_is_not_loaded_is_safe_and_stays_unloaded():
    safety = fork_safety("unit")
    assert safety.safe
    assert "torch.unit is not loaded" in safety.reason
    told = run(
        "import sys; from hardpoint_runtime.accelerator.start_safety import fork_safety;"
        "print(fork_safety('unit').safe, 'torch' in sys.modules)"
    )
    assert told == ["True", "False"]


@pytest.mark.parametrize(("bad", "safe"), [(True, False), (False, True)])
def test_a_process_forked_of_one_that_had_the_device_is_not_safe(bad, safe, monkeypatch):
    module = types.SimpleNamespace(_is_in_bad_fork=lambda: bad)
    monkeypatch.setitem(sys.modules, "torch.unit", module)
    safety = fork_safety("unit")
    assert safety.safe is safe
    assert ("had initialised torch.unit" in safety.reason) is bad


def test_what_is_preloaded_takes_no_device_and_starts_no_thread():
    """A nursery imports it, with one thread for libraries, and then forks."""
    told = run(
        "import os\n"
        "os.environ.update(OMP_NUM_THREADS='1', MKL_NUM_THREADS='1', OPENBLAS_NUM_THREADS='1')\n"
        "import importlib\n"
        f"for name in {PRELOADED}: importlib.import_module(name)\n"
        "import torch\n"
        "devices = [getattr(torch, n) for n in ('cuda', 'xpu')]\n"
        "print(len(os.listdir('/proc/self/task')), any(d.is_initialized() for d in devices))\n"
        "pid = os.fork()\n"
        "if not pid: os._exit(any(d._is_in_bad_fork() for d in devices))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    assert told == ["1", "False", "0"]
