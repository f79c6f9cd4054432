"""This process's connection to Ray: joined, or started together with a Ray of its own.

There is one for the whole process, whatever this package does: Ray keeps it. So executors share it
here, and the last one that needs a Ray that was started here stops it. A thread starts and stops
it that lives as long: Ray's processes end with the thread that started them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from hardpoint.config.problems import config_error
from hardpoint.errors import ExecutorFailedError
from hardpoint.records import Problem
from ray.util.client import ray as client

from hardpoint_ray import addresses, semaphores, signal_actions
from hardpoint_ray.settings import START_TIMEOUT

if TYPE_CHECKING:
    from hardpoint_ray.settings import RaySettings

_logger = logging.getLogger("hardpoint.executor.ray")

ADDRESS, AUTH_MODE, TOKEN, TOKEN_PATH = (
    "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH",
)  # fmt: skip

USAGE = "RAY_USAGE_STATS_ENABLED"
"""Whether Ray reports its use to its makers: not of one that is started here, unless it is set."""

NICENESS = "RAY_worker_niceness"
"""By how much Ray's workers yield to others: 15 by itself, which has a worker of a step wait for
whatever else runs on the host. Not of a Ray that is started here, unless it is set.
"""

CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Whether Ray listens to other hosts. The name is history: it does as this says everywhere, and has
no other way to keep to the loopback address (Ray 2.60 takes 127.0.0.1 for the host's own address).
"""

NO_CLIENT = (
    "{}, by which no worker can be watched; run the driver on a node of that Ray, and name it as "
    "host:port"
)

FIRST_LINE = 5.0
"""Seconds after which the first line tells that Ray is awaited; each next takes twice as long."""

STOP_SECONDS = 20.0
"""How long Ray's end is awaited. It takes two, on a machine with nothing beside."""

SILENT_SECONDS = 2.0
"""How long, of a Ray that does not answer."""

RAYS_FOLDER = "r"
"""What Ray makes its own of: it lets everybody into the folder that it is given (mode 0777)."""

_LONGEST_FOLDER = 24
"""Ray puts sockets into its folder, and the names of sockets are short."""

_SWEEP = """read -r _
i=0
while [ $i -lt 100 ] && pgrep -f -- "$1" | grep -qvx $$; do sleep 0.2; i=$((i+1)); done
if read -r pid < "$1/raylet"; then rm -f -- /dev/shm/sem.hdr"$pid"-* /dev/shm/sem.obj"$pid"-*; fi
rm -rf -- "$1"
"""
"""Waits for the end of this process, then for that of Ray's, which name the folder; removes that,
and the semaphores of :mod:`hardpoint_ray.semaphores`.
"""


class Session:
    """One use of the connection, by one executor. :meth:`close` is idempotent."""

    def __init__(self, connection: _Connection | None) -> None:
        self._connection = connection
        self._closed = False

    @property
    def is_own(self) -> bool:
        """Whether this Ray was started here."""
        return isinstance(self._connection, _OwnRay)

    def close(self, *, answers: bool = True) -> None:
        """Use it no more; whoever is the last ends a connection, or a Ray, that was made here.
        ``answers``: whether Ray did so, when it was asked something last.
        """
        with _LOCK:
            if self._closed:
                return
            self._closed = True
            if self._connection is not None:
                self._connection.leave(STOP_SECONDS if answers else SILENT_SECONDS)


class _Connection:
    """A connection to the Ray at ``address`` that was made here: its thread and its users."""

    current: _Connection | None = None
    stuck: _Connection | None = None
    """One that was given up while Ray was still at it."""

    @property
    def _waited_for(self) -> str:
        return f"the Ray at {self.address!r} to answer"

    def __init__(self, address: str) -> None:
        self.address = address
        self._users = 0
        self._ready: Future[None] = Future()
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._live, name="hardpoint-ray", daemon=True)
        self._thread.start()

    @property
    def goes_on(self) -> bool:
        """Whether its thread is at work."""
        return self._thread.is_alive()

    def join(self, seconds: float) -> Session:
        """Wait until it is up, and use it; raise what kept it from that, TimeoutError after so many
        seconds. Under the lock.
        """
        try:
            self._await(seconds)
            self._ready.result()
        except BaseException:
            self._end(STOP_SECONDS if self._ready.done() else 0.0)
            raise
        self._users += 1
        return Session(self)

    def _await(self, seconds: float) -> None:
        began, pause = time.monotonic(), FIRST_LINE
        while not wait([self._ready], min(pause, began + seconds - time.monotonic())).done:
            waited = time.monotonic() - began
            if waited >= seconds:
                raise TimeoutError(f"it did not within {START_TIMEOUT} = {seconds:g} s")
            _logger.warning("waiting for %s for %.0f s", self._waited_for, waited)
            pause *= 2

    def leave(self, seconds: float) -> None:
        """One user less; end it after the last, and wait so long for that. Under the lock."""
        self._users -= 1
        if self._users <= 0:
            self._end(seconds)

    def _end(self, seconds: float) -> bool:
        """Return whether it has ended."""
        _Connection.current = None
        self._leave.set()
        self._thread.join(seconds)
        if self._thread.is_alive():  # nothing ends Ray's own waiting but the process's end
            _Connection.stuck = self
        return not self._thread.is_alive()

    def _live(self) -> None:
        try:
            with _environment(self._variables()):
                try:
                    # Ray prints its stack at SIGTERM, over whatever the program does then.
                    with _quiet(), signal_actions.kept([signal.SIGTERM]):
                        self._open()
                except BaseException as error:  # noqa: BLE001 - raised where it is awaited
                    with contextlib.suppress(Exception):
                        ray.shutdown()
                    self._ready.set_exception(error)
                    return
                self._ready.set_result(None)
                self._leave.wait()
                ray.shutdown()
        except Exception:
            _logger.exception("ending Ray raised")

    def _variables(self) -> dict[str, str | None]:
        """Return what the environment is to have meanwhile; None: not that variable."""
        return {}

    def _open(self) -> None:
        addresses.require_listener(self.address)
        local = self.address.startswith(("127.", "localhost:", "[::1]"))
        if os.environ.get(TOKEN) or os.environ.get(TOKEN_PATH):
            _use_token()
        with _loopback() if local else contextlib.nullcontext():  # else it is taken for another
            ray.init(address=self.address, configure_logging=False, log_to_driver=True)


class _OwnRay(_Connection):
    """A Ray that was started here, in a folder of its own."""

    def __init__(self, resources: Mapping[str, float], object_store_bytes: int) -> None:
        self._folder = _folder()
        self._sweeper = _sweeper(self._folder)
        self._resources = dict(resources)
        self._object_store_bytes = object_store_bytes
        super().__init__("local")

    @property
    def _waited_for(self) -> str:
        return "Ray to start on this host"

    def _variables(self) -> dict[str, str | None]:
        wanted: dict[str, str | None] = {ADDRESS: None, CLUSTER: "0"}
        wanted[USAGE] = os.environ.get(USAGE, "0")
        wanted[NICENESS] = os.environ.get(NICENESS, "0")
        if not os.environ.get(TOKEN) and not os.environ.get(TOKEN_PATH):
            wanted[TOKEN_PATH] = str(self._folder / "token")
        return wanted

    def _open(self) -> None:
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
            "_temp_dir": str(self._folder / RAYS_FOLDER),
        }
        with _loopback():
            ray.init(**options)
        (self._folder / "raylet").write_text(f"{_raylet()}\n")

    def _end(self, seconds: float) -> bool:
        if not super()._end(seconds):
            return False  # what is left of it, the sweeper removes when the process has ended
        self._sweeper.kill()
        if self._sweeper.stdin is not None:
            self._sweeper.stdin.close()
        self._sweeper.wait()
        with contextlib.suppress(OSError, ValueError):
            semaphores.remove(semaphores.of(int((self._folder / "raylet").read_text())))
        shutil.rmtree(self._folder, ignore_errors=True)
        return True


_LOCK = threading.RLock()


def connect(settings: RaySettings, needed: Mapping[str, float]) -> Session:
    """Join Ray, or start one that has at least the resources ``needed`` (name -> amount, of all
    workers together).

    Raises ConfigError for a Ray that would have to be started without a token, ExecutorFailedError
    for one that cannot be joined or started.
    """
    with _LOCK:
        current = _Connection.current
        if client.is_connected():
            raise ExecutorFailedError(NO_CLIENT.format("the program is connected by Ray's client"))
        if ray.is_initialized():
            addresses.require_same(settings.address, is_own=isinstance(current, _OwnRay))
            return Session(None) if current is None else current.join(settings.start_timeout)
        key = "plugins.ray.address" if settings.address else ADDRESS
        address = settings.address or os.environ.get(ADDRESS) or "local"
        if (stuck := _Connection.stuck) is not None and stuck.goes_on:
            raise ExecutorFailedError(
                f"Ray is still at what was given up before (at {stuck.address!r}), and a process "
                "has one Ray: start another process"
            )
        if address == "local":
            _require_token(settings)
            _logger.info("starting Ray on this host, as none is named")
        elif address.startswith("ray://"):
            raise ExecutorFailedError(
                NO_CLIENT.format(f"{address!r} is an address for Ray's client")
            )
        _Connection.current = made = (
            _OwnRay(needed, settings.object_store_bytes)
            if address == "local"
            else _Connection(address)
        )
        try:
            return made.join(settings.start_timeout)
        except Exception as error:
            what = (
                "could not be started"
                if address == "local"
                else f"at {key} = {address!r} did not answer"
            )
            raise ExecutorFailedError(f"the Ray {what}: {error}") from error


def _require_token(settings: RaySettings) -> None:
    mode = os.environ.get(AUTH_MODE)
    if mode is None or mode.lower() == "token":
        return
    problem = Problem(
        key="plugins.ray.address",
        value=settings.address,
        message=f"a Ray would have to be started, and {AUTH_MODE}={mode} has it let in anyone.",
        way_out=f"Unset {AUTH_MODE}, or start Ray yourself and name its address.",
    )
    raise config_error([problem])


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
    return subprocess.Popen(  # noqa: S603 - the folder is an argument, no part of the script
        ["/bin/sh", "-c", _SWEEP, "hardpoint-ray-sweeper", str(folder)],
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


@contextlib.contextmanager
def _environment(wanted: Mapping[str, str | None]) -> Iterator[None]:
    """Have the variables ``wanted``, and restore those and the one that Ray sets itself."""
    before = {name: os.environ.get(name) for name in (*wanted, AUTH_MODE)}
    _set(wanted)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _use_token() -> None:
    """Have Ray show the token that the environment names, also to a Ray that is named by address:
    by itself it does so only where AUTH_MODE was set before Ray's import.
    """
    from ray._private.authentication import authentication_token_setup

    authentication_token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Have Ray listen on this host alone, as CLUSTER would, had it been set before Ray's import."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what Ray tells of its own start to itself: that there is a token, that it takes no
    signal on this thread.
    """
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
