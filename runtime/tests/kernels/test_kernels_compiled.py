"""The kernels compiled for devices that are not here: they fit into registers and shared memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("triton")

from attrs import evolve
from compiled import CASES, MORE_CASES, TARGETS, cached_at, compile_case

QUICK = ("sm_90", "gfx942")
"""One of each kind; all others take minutes."""


@pytest.fixture(scope="module")
def _cache(tmp_path_factory):
    """Where compilations are kept: nowhere for longer, unless the environment says so."""
    kept = os.environ.get("TRITON_CACHE_DIR")
    with cached_at(Path(kept) if kept else tmp_path_factory.mktemp("triton")):
        yield


LANES = 32
"""Scalars that fit into one vector register of any device; these are no spills into memory."""


def check(case, target):
    """Compile, and compare with what the device has."""
    report = compile_case(case, target)
    assert not any(report.spills), f"{target}: spills {report.spills}"
    assert report.scalars <= LANES
    assert report.shared <= TARGETS[target][1]
    assert report.code_bytes > 1000


@pytest.mark.usefixtures("_cache")
def test_a_stack_is_seen():
    """Four thousand tokens at once are more than registers hold there."""
    case = evolve(CASES["truncate"], constants={"TOKENS": 4096})
    assert compile_case(case, "sm_80").spills[0] > 0


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
            check(case, target)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
