"""A Ray that is started here, in a folder of its own: for this user, this host and this process."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from hardpoint_ray import semaphores
from hardpoint_ray.connection import Connection
from hardpoint_ray.surroundings import (
    ADDRESS,
    CLUSTER,
    NICENESS,
    TOKEN_PATH,
    USAGE,
    loopback,
    names_token,
)

RAYS_FOLDER = "r"
"""What Ray makes its own of: it lets everybody into the folder that it is given (mode 0777)."""

_LONGEST_FOLDER = 24
"""Ray puts sockets into its folder, and the names of sockets are short."""

_STARTING = "default_worker[.]py .*{}/"
"""The commands of workers that Ray is just starting: they look for a Ray that has ended for half a
minute. One that has begun its work has another name, and ends by itself.
"""

_SWEEP = """read -r _
i=0
while [ $i -lt 100 ] && pgrep -f -- "$1" | grep -qvx $$; do
  pkill -KILL -f -- "$2"
  sleep 0.2
  i=$((i+1))
done
if read -r pid < "$1/raylet"; then rm -f -- /dev/shm/sem.hdr"$pid"-* /dev/shm/sem.obj"$pid"-*; fi
rm -rf -- "$1"
"""
"""Waits for the end of this process, then for that of Ray's, which name the folder; removes that,
and the semaphores of :mod:`hardpoint_ray.semaphores`.
"""


class OwnRay(Connection):
    """A Ray that was started here, with at least ``resources``."""

    waited_for = "Ray to start on this host"
    is_own = True

    def __init__(self, resources: Mapping[str, float], object_store_bytes: int) -> None:
        self.folder = _folder()
        self._sweeper = _sweeper(self.folder)
        self._resources = dict(resources)
        self._object_store_bytes = object_store_bytes
        super().__init__("local")

    def variables(self) -> dict[str, str | None]:
        """Return what the environment is to have meanwhile."""
        wanted: dict[str, str | None] = {ADDRESS: None, CLUSTER: "0"}
        wanted[USAGE] = os.environ.get(USAGE, "0")
        wanted[NICENESS] = os.environ.get(NICENESS, "0")
        if not names_token():
            wanted[TOKEN_PATH] = str(self.folder / "token")
        return wanted

    def open(self) -> None:
        """Start it."""
        resources = dict(self._resources)
        cpus = resources.pop("CPU", 0.0)
        resources.pop("GPU", None)  # Ray finds them
        options: dict[str, Any] = {
            "address": self.address,
            "num_cpus": max(os.cpu_count() or 1, int(-(-cpus // 1))),
            "resources": resources,
            "include_dashboard": False,
            "object_store_memory": self._object_store_bytes,
            "configure_logging": False,
            "log_to_driver": True,
            "_temp_dir": str(self.folder / RAYS_FOLDER),
        }
        with loopback():
            ray.init(**options)
        (self.folder / "raylet").write_text(f"{_raylet()}\n")

    def end(self, seconds: float) -> bool:
        """End it, and remove what it had; return whether it has ended."""
        if not super().end(seconds):
            return False  # what is left of it, the sweeper removes when the process has ended
        self._sweeper.kill()
        if self._sweeper.stdin is not None:
            self._sweeper.stdin.close()
        self._sweeper.wait()
        with contextlib.suppress(OSError):  # no such command
            starting = _STARTING.format(self.folder)
            subprocess.run(["pkill", "-KILL", "-f", "--", starting], check=False)  # noqa: S603, S607
        with contextlib.suppress(OSError, ValueError):
            semaphores.remove(semaphores.of(int((self.folder / "raylet").read_text())))
        shutil.rmtree(self.folder, ignore_errors=True)
        return True


@functools.cache
def token() -> str:
    """Return this process's token: Ray reads it once, so each Ray started here has the same."""
    return secrets.token_hex(32)


def _folder() -> Path:
    """Make the folder for Ray's files, of this user alone, with the token in a file of its own."""
    usual = tempfile.gettempdir()
    base = usual if len(usual) <= _LONGEST_FOLDER else "/tmp"  # noqa: S108 - a folder 0700 in it
    folder = Path(tempfile.mkdtemp(prefix="hp-ray-", dir=base))
    descriptor = os.open(folder / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token())
    return folder


def _sweeper(folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that removes ``folder`` if this process ends without having done it."""
    arguments = ["hardpoint-ray-sweeper", str(folder), _STARTING.format(folder)]
    return subprocess.Popen(  # noqa: S603 - they are arguments, no part of the script
        ["/bin/sh", "-c", _SWEEP, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _raylet() -> int:
    """Return the process of the Ray that was started here in which its objects are."""
    from ray._private import ray_constants, worker

    processes = worker._global_node.all_processes[ray_constants.PROCESS_TYPE_RAYLET]  # noqa: SLF001
    pid: int = processes[0].process.pid
    return pid
