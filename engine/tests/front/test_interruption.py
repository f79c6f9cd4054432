"""Real signals to real processes: the end comes within a second, quietly, whatever is going on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

BEGIN = """
import signal, sys, threading, time
from hardpoint_engine.cli.interruption import interruptible
"""
WAYS = {
    "idle": """
with interruptible():
    print("ready", flush=True)
    time.sleep(60)
""",
    "a clean-up that hangs": """
with interruptible():
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        time.sleep(60)
""",
    "a thread that cannot be stopped": """
with interruptible():
    threading.Thread(target=time.sleep, args=(60,)).start()
    print("ready", flush=True)
    while True:
        try:
            threading.Event().wait(60)
        except Exception:
            pass
""",
    "an exception that somebody swallows": """
with interruptible():
    print("ready", flush=True)
    while True:
        try:
            time.sleep(60)
        except BaseException:
            continue
""",
}


def start(script: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def finish(process: subprocess.Popen) -> tuple[int, str]:
    try:
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    return process.returncode, errors


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
def test_one_signal_ends_it(way, number, code):
    process = start(WAYS[way])
    begun = time.monotonic()
    process.send_signal(number)
    assert finish(process) == (code, "")
    assert time.monotonic() - begun < 5  # a minute without the bound


def test_a_second_signal_ends_it_at_once():
    script = """
import hardpoint_engine.cli.interruption as interruption
interruption.GRACE = 60
with interruptible():
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("ready", flush=True)
        time.sleep(60)
"""
    process = start(script)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, "")


def test_what_is_closed_on_the_way_out_is_closed():
    script = """
with interruptible():
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("closed", file=sys.stderr, flush=True)
"""
    process = start(script)
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, "closed\n")


def test_an_ignored_signal_stays_ignored():
    script = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
with interruptible():
    print("ready", flush=True)
    sys.stdin.readline()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    process.communicate("go on\n", timeout=30)
    assert process.returncode == 0


def test_handlers_are_given_back():
    from hardpoint_engine.cli.interruption import interruptible

    before = signal.getsignal(signal.SIGINT)
    with interruptible():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
