"""The process of an engine ends with the benchmark, also in the middle of a turn."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

import pytest
from hardpoint_engine.bench.driver import HERE

ENGINE = """
import os, time
class Engine:
    vocab_size = 2000
    def __init__(self, told):
        self.told = told
    def run(self, prompts, new):
        with open(self.told, "w") as file:
            file.write(f"{os.getpid()}\\n")
        while True:
            time.sleep(0.05)
    def figures(self):
        return {}
    def close(self):
        pass
"""
BENCHMARK = """
import sys
from hardpoint_engine.bench.driver import HERE, Driver
driver = Driver("stub", script=(str(HERE / "serving_turns.py"), *sys.argv[1:]))
driver.opened()
driver.tell("turn", batch=1, length=2, new=1, seed=0)
"""
PATIENCE = 60.0


def until(condition):
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def is_gone(descriptor):
    """Whether a process has ended, by its pidfd: nobody else has its id."""
    return bool(select.select([descriptor], [], [], 0)[0])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it ends with its turn")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_engine_in_a_turn_ends_with_the_benchmark(tmp_path, number):
    script, told = tmp_path / "engine.py", tmp_path / "told"
    script.write_text(ENGINE)
    options = f'{{"told": "{told}"}}'
    command = [sys.executable, "-c", BENCHMARK, str(script), options]
    with subprocess.Popen(command) as benchmark:
        try:
            engine = int(until(lambda: told.exists() and told.read_text().rstrip("\n")))
            descriptor = os.pidfd_open(engine)
            try:
                assert engine != benchmark.pid
                assert benchmark.poll() is None
                assert not is_gone(descriptor)
                benchmark.send_signal(number)
                assert benchmark.wait(PATIENCE) == -number
                until(lambda: is_gone(descriptor))
            except BaseException:
                if not is_gone(descriptor):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                raise
            finally:
                os.close(descriptor)
        finally:
            benchmark.kill()


def test_what_is_run_by_path_imports_nothing_of_hardpoint():
    for name in ("orders.py", "turns.py", "serving_turns.py"):
        text = (HERE / name).read_text()
        assert "import hardpoint" not in text
        assert "from hardpoint" not in text
