"""The kernels compiled for devices that are not here: they fit into registers and shared memory."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from compiled import CASES, MORE_CASES, TARGETS, cached_at, compile_case

QUICK = ("sm_90", "gfx942")
"""One of each kind; all others take minutes."""


@pytest.fixture(scope="module")
def _cache(tmp_path_factory):
    with cached_at(tmp_path_factory.mktemp("triton")):
        yield


FLOATS_MAY_SPILL = 16
"""Bytes, in float32, which no processor of matrices computes: its products take every register."""


def check(case, target, spilled=0):
    report = compile_case(case, target)
    assert len(report.spills) == 3, "the compiler's report of spills has another form"
    assert max(report.spills) <= spilled, f"{target}: spills {report.spills}"
    assert report.shared <= TARGETS[target][1]
    assert report.code_bytes > 1000


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize("target", QUICK)
@pytest.mark.parametrize("name", CASES)
def test_every_kernel_on_one_device_of_each_kind(name, target):
    check(CASES[name], target)


@pytest.mark.slow
@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_type_and_size_on_every_device(target):
    for name, case in {**CASES, **MORE_CASES}.items():
        try:
            check(case, target, FLOATS_MAY_SPILL if "fp32" in name else 0)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
