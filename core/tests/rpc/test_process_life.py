"""What a process arranges about its own life."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hardpoint.rpc.process_life import is_stopped, members, thread_count

PATIENCE = 60.0

CHAIN = """
import os, subprocess, sys, time
from hardpoint.rpc.process_life import end_with_parent
if len(sys.argv) == 1:
    child = subprocess.Popen([sys.executable, "-c", os.environ["CHAIN"], str(os.getpid())],
                             stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
    print(child.pid, flush=True)
else:
    end_with_parent(int(sys.argv[1]))
    print("ready", flush=True)
time.sleep(1000)
"""


def wait_until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def state(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_a_child_ends_with_its_parent():
    with subprocess.Popen(
        [sys.executable, "-c", CHAIN],
        env={**os.environ, "CHAIN": CHAIN},
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
    wait_until(lambda: state(child) in ("", "Z"))


def test_a_child_whose_parent_is_gone_already_ends_at_once():
    done = subprocess.run(
        [sys.executable, "-c", CHAIN, "1" if os.getpid() != 1 else "2"],
        env={**os.environ, "CHAIN": CHAIN},
        stdout=subprocess.PIPE,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (137, b"")


def test_threads_are_counted():
    before = thread_count()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    assert thread_count() == before + 1
    stop.set()
    thread.join()


TITLE = """
import sys
from hardpoint.rpc.process_life import set_title
set_title(sys.argv[1])
print(open("/proc/self/cmdline", "rb").read().rstrip(b"\\0").decode())
print(open("/proc/self/comm").read().strip())
print(sys.argv[1:])
"""


@pytest.mark.parametrize("title", ["Worker_PP1_TP0", "x" * 5000, ""])
def test_a_title_is_what_others_see_of_a_process(title):
    done = subprocess.run(
        [sys.executable, "-c", TITLE, title], capture_output=True, text=True, check=True
    )
    command, name, arguments = done.stdout.splitlines()
    assert name == title[:15]
    assert command == title
    assert arguments == repr([title])
    assert done.stderr == ""


def test_members_of_a_group_and_whether_one_is_stopped():
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:
        wait_until(lambda: members(process.pid, process.pid) == [process.pid])
        assert members(process.pid, os.getsid(0)) == []
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(process.pid))
        process.kill()
    assert members(process.pid, process.pid) == []
    assert not is_stopped(process.pid)
