"""Signals at random moments, to the driver, the nursery or a worker: a named error or nothing, the
next group works, and at the end nothing is left (fixture ``marked``). The seed is in each message.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from fault_groups import PATIENCE, settle

SCRIPT = str(Path(__file__).with_name("signal_driver.py"))
TITLES = {"nursery": "hardpoint-nursery", "worker": "Worker"}
SIGNALS = {
    "interrupt": signal.SIGINT,
    "terminate": signal.SIGTERM,
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
}
LONGEST = 1.2
"""Seconds within which the signal comes: a life of the driver's group takes less."""
MOMENTS = 3


@pytest.mark.slow
@pytest.mark.parametrize("what", SIGNALS)
@pytest.mark.parametrize("whom", ["driver", "nursery", "worker"])
def test_a_signal_at_a_random_moment(drivers, whom, what):
    for _ in range(MOMENTS):
        seed = random.SystemRandom().randrange(2**32)
        try:
            strike(drivers, random.Random(seed), whom, what)
        except BaseException as error:
            error.add_note(f"seed {seed}: {what} to the {whom}")
            raise
        drivers.close()
        settle(lambda: not drivers.family())


def strike(drivers, source, whom, what):
    start = source.choice(["nursery", "plain"])
    driver = drivers.run([sys.executable, SCRIPT, f"plugins.mp.start={start}"])
    driver.until("begins")
    time.sleep(source.uniform(0, LONGEST))  # the moment, not a synchronisation
    victim = found(drivers, driver, source, whom)
    os.kill(victim, SIGNALS[what])
    if what == "stop":
        time.sleep(source.uniform(0, 0.5))
        os.kill(victim, signal.SIGCONT)
    if whom == "driver" and what != "stop":
        code, text = driver.ended()
        wanted = {"interrupt": 0, "terminate": -signal.SIGTERM, "kill": -signal.SIGKILL}[what]
        assert code == wanted, text
        settle(lambda: not drivers.family(), 10)
        return
    failed = []
    lives = 0
    while lives < 2:
        word, text = driver.word()
        lives += word == "ended"
        if word == "failed":
            failed.append(text)
    driver.process.stdin.close()
    driver.until("enough")
    code, text = driver.ended()
    assert code == 0, text
    assert len(failed) <= 1, failed
    if what in ("stop", "interrupt"):
        assert not failed, "a moment's stop harms nobody, and Ctrl-C is the driver's alone"
    if failed and whom == "worker":
        expected = rf"WorkerDiedError: worker rank \d \(pid {victim}\) ended by signal \d+"
        assert re.match(expected, failed[0]), failed
    if failed and whom == "nursery":
        assert re.match(r"ExecutorFailedError: .*nursery", failed[0]), failed


def found(drivers, driver, source, whom):
    """Return a process of the kind, as soon as there is one."""
    if whom == "driver":
        return driver.process.pid
    end = time.monotonic() + PATIENCE
    while True:
        family = drivers.family()
        pids = sorted(pid for pid, command in family.items() if command.startswith(TITLES[whom]))
        if pids:
            return source.choice(pids)
        assert time.monotonic() < end, family
