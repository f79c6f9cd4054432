"""``external_launcher`` in driver mode, and a launcher: it starts the other ranks' processes."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import weakref
from pathlib import Path

import cloudpickle
from attrs import evolve
from hardpoint_external_launcher.driver import DriverExecutor

RANK = Path(__file__).with_name("launched_rank.py")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def _environment(**values):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _reap(processes):
    """Wait for the other ranks, which end with rank 0; end one that does not, and say so."""
    for process in processes:
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


class LaunchedExecutor(DriverExecutor):
    """Rank 0, and the launcher of all others."""

    _reaper = None

    def start_workers(self):
        """Start the other ranks, then do as rank 0."""
        size = self.world_size
        given = ("0", str(size), "0", "127.0.0.1", str(_free_port()))
        values = dict(zip(VARIABLES, given, strict=True))
        boot = cloudpickle.dumps(
            {
                "config": evolve(self.config, executor=None),
                "executor": self.config.executor,
            }
        )
        sent = cloudpickle.dumps({"boot": boot, "path": list(sys.path)})
        launched = []
        # Made first, it runs last: when the executor is gone, whose end is that of the others.
        self._reaper = weakref.finalize(self, _reap, launched)
        for rank in range(1, size):
            environ = {**os.environ, **values, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(
                [sys.executable, str(RANK)], stdin=subprocess.PIPE, env=environ
            )
            launched.append(process)
            process.stdin.write(sent)
            process.stdin.close()
        with _environment(**values):
            super().start_workers()

    def stop_workers(self, deadline):
        """End this rank, and wait for the others."""
        super().stop_workers(deadline)
        if self._reaper is not None:
            self._reaper()
