"""Which kernels are offered, and the reason where one cannot serve."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
from hardpoint_runtime.kernels import offers
from hardpoint_runtime.operations import NAMES

NEEDS = {
    "device": "acme", "dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "block_size": 16,
    "head_size": 64, "num_heads": 8, "num_kv_heads": 2, "window": True, "softcap": True,
}  # fmt: skip


def reasons(**changes):
    found = {
        each.name: each.supports({**NEEDS, **changes}) for each in offers.kernel_operations("x")
    }
    assert set(found) == set(offers.KERNELS) <= set(NAMES)
    return found


def test_a_host_has_no_kernels():
    assert set(reasons(device="cpu").values()) == {"Triton compiles for no processor"}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a device is here")
def test_without_a_driver_the_reason_is_triton_s():
    (reason,) = set(reasons().values())
    assert reason.startswith("Triton has no driver for acme: ")
    assert "driver" in reason.removeprefix("Triton has no driver for acme: ")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float64"}, "dtype float64 is none of float32, bfloat16, float16"),
        ({"kv_cache_dtype": "float8_e4m3fn"}, "kv_cache_dtype float8_e4m3fn is none of"),
        ({"head_size": 512}, "head size 512 is above 256"),
    ],
)
def test_types_and_sizes_that_no_kernel_has(changes, words):
    found = reasons(device="cpu", **changes)
    for name in offers.OF_NUMBERS:
        assert words in found.pop(name)
    assert set(found.values()) == {"Triton compiles for no processor"}


def test_without_triton_the_reason_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else find(name)
    )
    (reason,) = set(reasons().values())
    assert reason == "Triton is not installed: pip install 'hardpoint-runtime[kernels]'"


def test_an_old_triton_is_named(monkeypatch):
    import triton

    monkeypatch.setattr(triton, "__version__", "3.2.0")
    (reason,) = set(reasons().values())
    assert reason == "Triton 3.2.0 is older than 3.4: pip install 'triton>=3.4'"


def test_offers_and_the_runner_need_no_triton():
    """They are imported in a process that has none."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import hardpoint_runtime.kernels.offers, hardpoint_runtime.model_runner\n"
        "print(len(hardpoint_runtime.kernels.offers.kernel_operations('x')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "11\n", done.stderr
