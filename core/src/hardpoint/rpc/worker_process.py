"""A worker's process from its first line of Hardpoint to its last: build the worker, serve, end.

Executors that give each worker a process of its own run :func:`run` there. What the driver wants of
the worker is a :class:`Boot`; the channel carries the calls, the control lane the rest.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, Protocol

from attrs import field, frozen

from hardpoint.config.resolution import structure_plugins
from hardpoint.metadata import ResolvedPlugin
from hardpoint.records import WorkerContext
from hardpoint.registry import Registry
from hardpoint.rpc.calls import PackedCall, Reply
from hardpoint.rpc.channel import ChannelClosedError
from hardpoint.rpc.control import ControlThread
from hardpoint.rpc.encoding import codec_of
from hardpoint.rpc.failures import RemoteFailure
from hardpoint.rpc.faults import DUPLICATE, LOSE, VARIABLE, fault
from hardpoint.rpc.host import WorkerHost
from hardpoint.rpc.this_process import THIS

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.stages import StageCarrier

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
    ``resources`` are what a launcher assigned to this process (name -> ids), which the platform
    reads (``assigned_devices``) unless the configuration names ``devices``.
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
    resources: Mapping[str, tuple[str, ...]] = field(factory=dict)


class _Work:
    """What the process is at, for the control lane and the signal handler."""

    def __init__(self) -> None:
        self.call = ""
        self.closing = False
        self.left = False
        self.worker = os.getpid()

    def text(self) -> str:
        return self.call

    def leave(self, signum: int, frame: FrameType | None) -> None:
        """Handle SIGTERM: leave whatever runs, once; what is closing already goes on."""
        if not self.closing and not self.left:
            self.left = True
            raise SystemExit(128 + signum)


def run(
    boot: Boot,
    attach: Callable[[], CallEnd],
    control: ControlThread,
    begin: Callable[[int], bool] | None = None,
    learn: Callable[[Registry], None] | None = None,
    stages: StageCarrier | None = None,
) -> int:
    """Be the worker that ``boot`` describes until the driver wants no more; return the exit code.

    Runs on the main thread. ``begin(call id)`` says whether a call is still wanted (WorkerClaims).
    ``learn`` is that of the channel's codec (:meth:`hardpoint.rpc.encoding.Codec.learn`),
    ``stages`` as in :class:`hardpoint.records.WorkerContext`. SIGTERM has the worker leave its
    work, shut down, and end by that signal.
    """
    _log(boot.log_level)
    fault.plan(os.environ.get(VARIABLE))
    work = _Work()
    signal.signal(signal.SIGTERM, work.leave)
    code = FAILED
    try:
        control.stage("channel")
        end = attach()
        try:
            code = _live(
                boot,
                partial(_built, boot, control, learn, stages),
                end,
                control,
                work,
                begin or _always,
            )
        finally:
            end.close()
    except SystemExit:
        if not work.left:
            raise
    if work.left:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    return code


def _live(
    boot: Boot,
    build: Callable[[], WorkerHost],
    end: CallEnd,
    control: ControlThread,
    work: _Work,
    begin: Callable[[int], bool],
) -> int:
    """Build the worker, serve, shut it down.

    A worker that cannot be built tells why by the channel, and waits to be ended by the driver:
    were this process to end first, its end would hide the cause.
    """
    host: WorkerHost | None = None
    failure = None
    try:
        host = build()
        fault("worker.before_ready", boot.rank)
    except BaseException as error:  # noqa: BLE001 - told to the driver, which raises it
        failure = RemoteFailure.of(error, encode=codec_of(boot.config).encode_exception)
    reply = Reply(
        call_id=boot.start_call, rank=boot.rank, generation=boot.generation, failure=failure
    )
    try:
        end.reply(reply)
        if host is None or failure is not None:
            _await_end(end, work)
            return FAILED
        control.watch(host.health, work.text)
        control.on_end_collectives(host.worker.end_collectives)
        control.stage("ready")
        gc.freeze()  # what is built lives as long as the process does
        with suppress(ChannelClosedError):  # by which the driver says that it wants no more
            _serve(end, host, control, work, begin)
    finally:
        work.closing = True
        control.before_shutdown()
        if host is not None:
            host.close()
    return 0


def _built(
    boot: Boot,
    control: ControlThread,
    learn: Callable[[Registry], None] | None,
    stages: StageCarrier | None,
) -> WorkerHost:
    control.stage("plugins")
    registry = Registry.from_resolved(boot.plugins, boot.config)
    config = structure_plugins(boot.config, registry)
    platform = registry.platform(boot.platform)
    if learn is not None:
        learn(registry)
    control.stage("worker")
    context = WorkerContext(
        config=config,
        rank=boot.rank,
        local_rank=boot.local_rank,
        world_size=boot.world_size,
        devices=boot.devices or platform.assigned_devices(boot.resources),
        rendezvous=boot.rendezvous,
        model_runner=boot.model_runner,
        generation=boot.generation,
        cancelled=control.cancelled,
        stages=stages,
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
    """Run calls in order of arrival until ``shutdown`` was one, except those that were taken back.

    After the driver's order to leave, no other is begun or answered: the driver has given up what
    it has sent.
    """
    rank = host.context.rank
    while True:
        call = end.receive(None)
        if call is None:
            continue
        work.call = call.name
        if fault.active:
            fault("worker.received", rank)
        if call.name == "shutdown":
            work.closing = True
            control.before_shutdown()
            fault("shutdown.worker", rank)
        elif control.cancelled():
            continue
        elif call.queued and not begin(call.call_id):
            end.reply(Reply(call_id=call.call_id, rank=rank, generation=call.generation))
            continue
        reply = host.handle(call, carried=True)
        call = None  # what it holds is free for the next one as soon as the driver hears of it
        if THIS.pid != work.worker:
            _end_child()
        if work.left:
            return
        if fault.active:
            _reply_as_planned(end, reply)
        else:
            end.reply(reply)
        if work.closing:
            return
        del call, reply  # hold nothing of it while waiting


def _end_child() -> NoReturn:
    """End this process, a child that a call forked: worker and channel are its parent's."""
    _logger.error("process %d, forked by a call, is no worker and ends here", os.getpid())
    os._exit(FAILED)


def _reply_as_planned(end: CallEnd, reply: Reply) -> None:
    """Reply, or not, or twice: as the fault says."""
    outcome = fault("reply.before_send", reply.rank)
    if outcome != LOSE:
        end.reply(reply)
    if outcome == DUPLICATE:
        end.reply(reply)
    fault("reply.after_send", reply.rank)


def _await_end(end: CallEnd, work: _Work) -> None:
    """Wait until the driver says that it knows."""
    while not work.left:
        call = end.receive(None)
        if call is not None and call.name == "shutdown":
            return


def _log(level: int) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        format="%(levelname)s %(name)s: %(message)s",
        force=True,
    )
