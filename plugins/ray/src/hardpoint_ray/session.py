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
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from hardpoint.config.problems import config_error
from hardpoint.errors import ExecutorFailedError
from hardpoint.records import Problem

if TYPE_CHECKING:
    from hardpoint_ray.settings import RaySettings

_logger = logging.getLogger("hardpoint.executor.ray")

ADDRESS, AUTH_MODE, TOKEN, TOKEN_PATH = (
    "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH",
)  # fmt: skip

CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Whether Ray listens to other hosts. The name is history: it does as this says everywhere, and has
no other way to keep to the loopback address (Ray 2.60 takes 127.0.0.1 for the host's own address).
"""

STOP_SECONDS = 20.0
"""How long Ray's end is awaited. It takes two, on a machine with nothing beside."""

_LONGEST_FOLDER = 30
"""Ray puts sockets into its folder, and the names of sockets are short."""

_SWEEP = 'read -r _; i=0; while [ $i -lt 100 ] && pgrep -f -- "$1" >/dev/null; do sleep 0.2; '
_SWEEP += 'i=$((i+1)); done; rm -rf -- "$1"'


class Session:
    """One use of the connection, by one executor. :meth:`close` is idempotent."""

    def __init__(self, started: _Started | None) -> None:
        self._started = started
        self._closed = False

    @property
    def is_own(self) -> bool:
        """Whether this Ray was started here."""
        return self._started is not None

    def close(self) -> None:
        """Use it no more; whoever is the last ends a Ray that was started here."""
        with _LOCK:
            if self._closed:
                return
            self._closed = True
            if self._started is not None:
                self._started.leave()


class _Started:
    """A Ray that was started here, with the connection to it: its folder, its thread, its users."""

    current: _Started | None = None

    def __init__(self, resources: Mapping[str, float], object_store_bytes: int) -> None:
        self.users = 0
        self._ready: Future[None] = Future()
        self._leave = threading.Event()
        self._folder = _folder()
        self._sweeper = _sweeper(self._folder)
        self._resources = dict(resources)
        self._object_store_bytes = object_store_bytes
        self._thread = threading.Thread(target=self._live, name="hardpoint-ray", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until it is up; raise what kept it from starting."""
        try:
            self._ready.result()
        except BaseException:
            self.leave(force=True)
            raise
        self.users += 1

    def leave(self, *, force: bool = False) -> None:
        """One user less; stop after the last. Under the lock."""
        self.users -= 1
        if self.users > 0 and not force:
            return
        _Started.current = None
        self._leave.set()
        self._thread.join(STOP_SECONDS)
        if self._sweeper.stdin is not None:
            self._sweeper.kill()
            self._sweeper.stdin.close()
        self._sweeper.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _live(self) -> None:
        try:
            with _environment(self._folder):
                try:
                    self._start()
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

    def _start(self) -> None:
        resources = dict(self._resources)
        cpus = resources.pop("CPU", 0.0)
        resources.pop("GPU", None)  # Ray finds them
        options: dict[str, Any] = {
            "address": "local",
            "num_cpus": max(os.cpu_count() or 1, int(-(-cpus // 1))),
            "resources": resources,
            "include_dashboard": False,
            "object_store_memory": self._object_store_bytes,
            "configure_logging": False,
            "log_to_driver": True,
            "_temp_dir": str(self._folder),
        }
        with _quiet(), _loopback():
            ray.init(**options)


_LOCK = threading.RLock()


def connect(settings: RaySettings, needed: Mapping[str, float]) -> Session:
    """Join Ray, or start one that has at least the resources ``needed`` (name -> amount, of all
    workers together).

    Raises ConfigError for a Ray that would have to be started without a token, ExecutorFailedError
    for one that cannot be joined or started.
    """
    with _LOCK:
        address = settings.address
        if ray.is_initialized():
            started = _Started.current
            if started is not None:
                started.join()
            return Session(started)
        if address is None:
            address = os.environ.get(ADDRESS) or "local"
        if address == "local":
            return _start(settings, needed)
        _join(address)
        return Session(None)


def _start(settings: RaySettings, needed: Mapping[str, float]) -> Session:
    mode = os.environ.get(AUTH_MODE)
    if mode is not None and mode.lower() != "token":
        problem = Problem(
            key="plugins.ray.address",
            value=settings.address,
            message=f"a Ray would have to be started, and {AUTH_MODE}={mode} has it let in anyone.",
            way_out=f"Unset {AUTH_MODE}, or start Ray yourself and name its address.",
        )
        raise config_error([problem])
    _logger.info("starting Ray on this host, as none is named")
    started = _Started.current = _Started(needed, settings.object_store_bytes)
    try:
        started.join()
    except BaseException as error:
        _Started.current = None
        if isinstance(error, Exception):
            raise ExecutorFailedError(f"Ray could not be started: {error}") from error
        raise
    return Session(started)


def _join(address: str) -> None:
    if address.startswith("ray://"):
        raise ExecutorFailedError(
            f"{address!r} is an address for Ray's client, by which no worker can be watched; run "
            "the driver on a node of that Ray, and name it as host:port"
        )
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with _quiet():
            ray.init(address=address, configure_logging=False, log_to_driver=True)
    except Exception as error:
        raise ExecutorFailedError(f"the Ray at {address!r} cannot be joined: {error}") from error
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)  # Ray takes it


@functools.cache
def _token() -> str:
    """Return this process's token: Ray reads it once, so each Ray started here has the same."""
    return secrets.token_hex(32)


def _folder() -> Path:
    """Make the folder for Ray's files, of this user alone, with the token in a file of its own."""
    usual = tempfile.gettempdir()
    base = usual if len(usual) <= _LONGEST_FOLDER else "/tmp"  # noqa: S108 - a folder 0700 in it
    folder = Path(tempfile.mkdtemp(prefix="hp-ray-", dir=base))
    descriptor = os.open(folder / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(_token())
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


@contextlib.contextmanager
def _environment(folder: Path) -> Iterator[None]:
    """Have Ray's processes find the token of ``folder``, unless the user has another; and restore
    the variables, of which Ray sets some itself.
    """
    before = {name: os.environ.get(name) for name in (ADDRESS, AUTH_MODE, TOKEN_PATH, CLUSTER)}
    os.environ.pop(ADDRESS, None)
    os.environ[CLUSTER] = "0"
    if not os.environ.get(TOKEN) and not os.environ.get(TOKEN_PATH):
        os.environ[TOKEN_PATH] = str(folder / "token")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


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
