"""Starts the ranks of a program by hand, with the variables that a launcher would set."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

PATIENCE = 240.0


def free_port():
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def variables(rank, size, port):
    """Return what a launcher would set for ``rank``."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


class Ranks:
    """Processes that run ``program`` (a file, and its arguments), one for each rank."""

    def __init__(self, program, size, folder, *arguments, only=None, environ=lambda rank: {}):
        self.port = free_port()
        self.folder = folder
        self.size = size
        self.command = [sys.executable, str(program), *arguments]
        self.environ = environ
        self.processes = {}
        for rank in range(size) if only is None else only:
            self.start(rank)

    def start(self, rank, name=None):
        """Start a rank, as the process ``name`` (unset: its number)."""
        name = rank if name is None else name
        out = (self.folder / f"out-{name}").open("w")
        error = (self.folder / f"error-{name}").open("w")
        own = variables(rank, self.size, self.port)
        with out, error:
            self.processes[name] = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=error,
                env={**os.environ, **own, **self.environ(rank)},
            )

    def out(self, rank):
        return (self.folder / f"out-{rank}").read_text()

    def error(self, rank):
        return (self.folder / f"error-{rank}").read_text()

    def wait(self, *ranks):
        """Return the exit codes of ``ranks`` (all, if none is named)."""
        chosen = ranks or sorted(self.processes, key=str)
        return [self.processes[rank].wait(PATIENCE) for rank in chosen]

    def end(self):
        for process in self.processes.values():
            process.kill()
            process.wait()
            process.stdin.close()


PROGRAM = Path(__file__).with_name("rank_program.py")
