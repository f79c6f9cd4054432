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


SPILLED = {("gfx1100", "fp32 256"): 192}
"""The most bytes that kernels put into memory, by device, type and head; all others none. There,
products of float32 take registers for every factor, and 32 lanes share 16 keys of 256 numbers.
"""


def check(name, case, target):
    """Compile, and compare with what the device has."""
    spilled = sum(
        most for (where, what), most in SPILLED.items() if where == target and what in name
    )
    report = compile_case(case, target)
    assert len(report.spills) == 3, "the compiler's report of spills has another form"
    assert max(report.spills) <= spilled, f"{target}: spills {report.spills}"
    assert report.shared <= TARGETS[target][1]
    assert report.code_bytes > 1000


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize("target", QUICK)
@pytest.mark.parametrize("name", CASES)
def test_every_kernel_on_one_device_of_each_kind(name, target):
    check(name, CASES[name], target)


@pytest.mark.slow
@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_type_and_size_on_every_device(target):
    for name, case in {**CASES, **MORE_CASES}.items():
        try:
            check(name, case, target)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
