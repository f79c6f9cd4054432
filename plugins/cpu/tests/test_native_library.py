"""Whether there is a native library, and what is said and done where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hardpoint.config.loading import load_config
from hardpoint_cpu.native import library
from hardpoint_cpu.native.library import LEVELS, REASON, Availability, availability, problems
from hardpoint_cpu.platform import CpuPlatform
from hardpoint_cpu.settings import CpuSettings

PROJECT = Path(__file__).parents[1]
NONE = Availability(reason="no native library: x")
COMMAND = "from hardpoint_cpu.native.library import availability as a; print(a(), end='')"


def test_the_doctor_says_how_steps_run_and_why(monkeypatch):
    def said(**settings):
        verdict = CpuPlatform(CpuSettings(**settings)).probe()
        assert verdict.available
        return verdict.reason

    monkeypatch.setattr(library, "availability", lambda: Availability(levels=LEVELS[:2]))
    lacking = "(this processor or build has no avx512 or avx512_bf16),"
    assert f"as native programs of avx2 instructions {lacking}" in said(native="auto")
    assert "as native programs of portable" in said(native="on", native_level="portable")
    assert said(native="off").endswith("through torch: native programs are off")
    monkeypatch.setattr(library, "availability", lambda: Availability(levels=LEVELS))
    assert "as native programs of avx512_bf16 instructions," in said(native="auto")
    monkeypatch.setattr(library, "availability", lambda: NONE)
    assert said(native="auto").endswith("through torch: no native library: x")


def test_programs_are_the_default():
    assert CpuSettings().native == "auto"


def test_an_installation_without_it_says_why(tmp_path):
    assert availability(tmp_path).reason == "no native library: it is not in this installation"
    (tmp_path / REASON).write_text("there was no C++ compiler\n")
    assert availability(tmp_path).reason == "no native library: there was no C++ compiler"
    (tmp_path / library.FILE).write_bytes(b"not a library")
    assert "no native library" in availability(tmp_path).reason
    assert availability(tmp_path).levels == ()


def test_what_cannot_be_had_is_refused_with_what_can():
    none, some = Availability(reason="no native library: x"), Availability(levels=LEVELS[:2])
    for given, available, key in (
        (CpuSettings(native="on"), none, "plugins.cpu.native"),
        (CpuSettings(native="auto", native_level="avx512"), some, "plugins.cpu.native_level"),
    ):
        (problem,) = problems(given, available)
        assert problem.key == key
        assert problem.way_out
    for given, available in (
        (CpuSettings(native="auto"), none),
        (CpuSettings(native="off", native_level="avx512"), some),
        (CpuSettings(native="on", native_level="portable"), some),
    ):
        assert problems(given, available) == []


def test_the_platform_checks_it(monkeypatch):
    monkeypatch.setattr(
        library, "availability", lambda: Availability(reason="no native library: x")
    )
    config = load_config(environ={})
    found = CpuPlatform(CpuSettings(native="on")).check(config)
    assert [problem.key for problem in found] == ["plugins.cpu.native"]


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_whole_but_for_the_library(tmp_path):
    """Its tag is of any machine, and an installation of it says why there is no library."""
    import os
    import shutil

    copy = shutil.copytree(
        PROJECT, tmp_path / "cpu", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.txt")
    )
    wheels = tmp_path / "wheels"
    for variables, tag in (({"CXX": "no-such-compiler"}, "py3-none-any"), ({}, "linux")):
        done = subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index",
             "--no-build-isolation", "--wheel-dir", str(wheels), str(copy)],
            env={**os.environ, **variables}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        (wheel,) = wheels.iterdir()
        assert tag in wheel.name
        folder = tmp_path / tag
        shutil.unpack_archive(wheel, folder, "zip")
        told = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); {COMMAND}"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert ("no C++ compiler" in told) == bool(variables)
        assert ("portable" in told) == (not variables)
        wheel.unlink()


def test_a_step_is_checked_before_it_is_computed():
    """Ids, positions and blocks that there are not would be read beside the memory."""
    if not availability().levels:
        pytest.skip(availability().reason)
    program = Path(__file__).with_name("native_steps.py")
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "whole and cut up alike\n", done.stderr
