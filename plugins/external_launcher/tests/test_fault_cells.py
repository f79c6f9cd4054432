"""The fault matrix of launched ranks: when one falls, the others end in time and name it."""

from __future__ import annotations

import signal
import time

import psutil
import pytest

pytestmark = pytest.mark.slow
DRIVER = "plugins.external_launcher.driver_only=true"
MODES = {"same": (), "driver": (DRIVER,)}
POINTS = ("build", "init_device", "load", "warm_up", "step", "step:6")
DEADLINE = 60.0
"""Seconds that the others have at a heavy load; 3 without one."""


def cells():
    """Yield (mode, point, kind, victim): every kind at a step, and at each other point some."""
    for mode in MODES:
        for victim in (0, 1):
            for kind in ("kill", "exit", "stop"):
                yield mode, "step", kind, victim
        yield mode, "shutdown", "kill", 1
    for point in POINTS:
        if point != "step":
            for kind in ("exit", "stop"):
                yield "same", point, kind, 1
            yield "driver", point, "kill", 1


@pytest.mark.parametrize(("mode", "point", "kind", "victim"), list(cells()))
def test_the_others_end_in_time_and_name_who_fell(launch, mode, point, kind, victim):
    fault = f'plugins.dummy.fail_at="{point}@{victim}={kind}"'
    quick = ("plugins.dummy.silent_after=2.0", "plugins.external_launcher.start_timeout=90.0")
    ranks = launch("steps", 2, *MODES[mode], fault, *quick)
    other, fallen = 1 - victim, ranks.processes[victim]
    if kind == "stop":
        launch.settle(lambda: psutil.Process(fallen.pid).status() == psutil.STATUS_STOPPED)
    else:
        assert ranks.wait(victim) != [0], "the fault fired"
    began = time.monotonic()
    code = ranks.wait(other)
    assert time.monotonic() - began < DEADLINE
    if point == "shutdown":  # it had said that it is done
        assert code == [0], ranks.error(other)
    else:
        assert code == [1], ranks.error(other)
        assert f"rank {victim} (pid {fallen.pid})" in ranks.error(other)
    if kind == "stop":
        assert fallen.poll() is None, "nobody ends what another launcher's rank is"
        fallen.send_signal(signal.SIGCONT)
        (own,) = ranks.wait(victim)
        assert own != 0
        assert f"rank {other} (pid" in ranks.error(victim), "continued, it finds the others gone"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("point", ["build", "init_device", "load", "warm_up"])
def test_an_exception_of_one_rank_at_its_start_ends_all_with_it(launch, mode, point):
    ranks = launch("steps", 2, *MODES[mode], f'plugins.dummy.fail_at="{point}@1=raise"')
    code, own = ranks.wait()
    assert code == 1
    assert "rank 1" in ranks.error(0)
    assert "DummyFault" in ranks.error(0)
    if mode == "same":  # else it did as rank 0 wanted to its end
        assert own == 1
        assert "DummyFault" in ranks.error(1)
