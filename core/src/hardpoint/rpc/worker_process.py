"""A worker's process from its first line of Hardpoint to its last: build the worker, serve, end.

Executors that give each worker a process of its own run :func:`run` there. What the driver wants of
the worker is a :class:`Boot`; the channel carries the calls, the control lane the rest.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from attrs import frozen

from hardpoint.config.resolution import structure_plugins
from hardpoint.errors import CancelledStepError
from hardpoint.metadata import ResolvedPlugin
from hardpoint.records import WorkerContext
from hardpoint.registry import Registry
from hardpoint.rpc.calls import PackedCall, Reply
from hardpoint.rpc.control import ControlThread
from hardpoint.rpc.failures import RemoteFailure
from hardpoint.rpc.host import WorkerHost

if TYPE_CHECKING:
    from hardpoint.config import Config

_logger = logging.getLogger("hardpoint.worker")

FAILED = 1
"""Exit code of a worker that could not be built."""


class CallEnd(Protocol):
    """The worker's end of a channel."""

    def receive(self, timeout: float | None = None) -> PackedCall | None:
        """Return the next call; None after ``timeout`` seconds without one."""

    def reply(self, reply: Reply) -> None:
        """Send one reply."""

    def close(self) -> None:
        """Give the channel back."""


@frozen(kw_only=True)
class Boot:
    """What the driver tells a worker's process at its start.

    ``start_call`` is the id of the call that the worker acknowledges once it is built.
    ``rendezvous`` as in :class:`hardpoint.records.WorkerContext`. ``log_level`` is the driver's.
    """

    config: Config
    plugins: tuple[ResolvedPlugin, ...]
    platform: str
    worker_class: str
    model_runner: str
    rank: int
    local_rank: int
    world_size: int
    generation: int
    start_call: int
    devices: tuple[str, ...] = ()
    rendezvous: str | None = None
    log_level: int = logging.WARNING


class _Work:
    """What the process is at, for the control lane and the signal handler."""

    def __init__(self) -> None:
        self.call = ""
        self.closing = False

    def text(self) -> str:
        return self.call

    def leave(self, signum: int, frame: FrameType | None) -> None:
        """Handle SIGTERM: leave whatever runs, once; what is closing already goes on."""
        if not self.closing:
            raise SystemExit(128 + signum)


def run(
    boot: Boot,
    attach: Callable[[], CallEnd],
    control: ControlThread,
    begin: Callable[[int], bool] | None = None,
) -> int:
    """Be the worker that ``boot`` describes until the driver wants no more; return the exit code.

    Runs on the main thread. ``begin(call id)`` says whether a call is still wanted (WorkerClaims).
    A worker that cannot be built tells why by the channel, and waits to be ended by the driver, who
    then knows the cause before the end.
    """
    _log(boot.log_level)
    work = _Work()
    signal.signal(signal.SIGTERM, work.leave)
    control.stage("channel")
    end = attach()
    host: WorkerHost | None = None
    try:
        host = _built(boot, control)
        failure = None
    except BaseException as error:  # noqa: BLE001 - told to the driver, which raises it
        failure = RemoteFailure.of(error)
    try:
        reply = Reply(
            call_id=boot.start_call, rank=boot.rank, generation=boot.generation, failure=failure
        )
        end.reply(reply)
        if host is None:
            _await_end(end)
            return FAILED
        control.watch(host.health, work.text)
        control.stage("ready")
        gc.freeze()  # what is built lives as long as the process does
        _serve(end, host, control, work, begin or _always)
    except SystemExit as left:  # SIGTERM, between two calls
        return left.code if isinstance(left.code, int) else FAILED
    finally:
        work.closing = True
        if host is not None:
            host.close()
        end.close()
    return 0


def _built(boot: Boot, control: ControlThread) -> WorkerHost:
    control.stage("plugins")
    registry = Registry.from_resolved(boot.plugins, boot.config)
    config = structure_plugins(boot.config, registry)
    platform = registry.platform(boot.platform)
    control.stage("worker")
    context = WorkerContext(
        config=config,
        rank=boot.rank,
        local_rank=boot.local_rank,
        world_size=boot.world_size,
        devices=boot.devices,
        rendezvous=boot.rendezvous,
        model_runner=boot.model_runner,
        generation=boot.generation,
        cancelled=control.cancelled,
    )
    return WorkerHost(context, platform, registry, boot.worker_class)


def _always(call_id: int) -> bool:
    return True


def _serve(
    end: CallEnd,
    host: WorkerHost,
    control: ControlThread,
    work: _Work,
    begin: Callable[[int], bool],
) -> None:
    """Run calls in order of arrival until ``shutdown`` was one; after the driver's order to leave,
    no other is run, nor is one that was taken back.
    """
    rank = host.context.rank
    while True:
        call = end.receive(None)
        if call is None:
            continue
        work.call = call.name
        if call.name == "shutdown":
            work.closing = True
        elif control.cancelled():
            end.reply(_refusal(call, host))
            continue
        elif not begin(call.call_id):
            end.reply(Reply(call_id=call.call_id, rank=rank, generation=call.generation))
            continue
        end.reply(host.handle(call))
        if work.closing:
            return
        del call  # hold no arguments while waiting


def _await_end(end: CallEnd) -> None:
    """Wait for the driver's word: were this process to end first, its end would hide the cause."""
    while (call := end.receive(None)) is None or call.name != "shutdown":
        pass


def _refusal(call: PackedCall, host: WorkerHost) -> Reply:
    error = CancelledStepError(f"{call.name!r} was not begun: the driver ends this worker")
    return Reply(
        call_id=call.call_id,
        rank=host.context.rank,
        generation=call.generation,
        failure=RemoteFailure.of(error),
    )


def _log(level: int) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        format="%(levelname)s %(name)s: %(message)s",
        force=True,
    )
