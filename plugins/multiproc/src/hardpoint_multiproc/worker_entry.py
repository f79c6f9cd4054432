"""Where a worker's process becomes one, forked or plain."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from attrs import evolve
from hardpoint.rpc import channel, encoding
from hardpoint.rpc.claims import WorkerClaims
from hardpoint.rpc.control import ControlThread
from hardpoint.rpc.process_life import end_with_parent, set_title
from hardpoint.rpc.worker_process import run

from hardpoint_multiproc import descriptors
from hardpoint_multiproc.signals import LAST_STACK_SIGNAL, STACK_SIGNAL

if TYPE_CHECKING:
    from hardpoint.rpc.encoding import Codec
    from hardpoint.rpc.worker_process import CallEnd
    from hardpoint.stages import StageCarrier


class Carriage(Protocol):
    """What carries steps, or what pipeline stages hand on, in a launcher's own way."""

    @property
    def stages(self) -> StageCarrier | None:
        """As in :class:`hardpoint.records.WorkerContext`."""

    def attach(
        self, attach: Callable[[], CallEnd], codec: Codec, leaves: Callable[[], bool]
    ) -> CallEnd:
        """Return the end that ``attach()`` makes, with what is carried beside it. ``leaves()``
        turns true when the driver wants the worker to leave.
        """


def main(spec: Mapping[str, Any], given: Sequence[int | str], nursery: int) -> NoReturn:
    """Be the worker of ``spec``, a child of process ``nursery``.

    ``given`` are descriptors: the spec itself, the output, the control lane, the boot record, the
    memory for stacks, that for claims, the rendezvous if there is one, then those of the channel.
    """
    fds = [int(fd) for fd in given]
    for fd in fds:
        os.set_inheritable(fd, False)
    end_with_parent(nursery)
    enter(spec["cwd"])
    sys.argv = spec["argv"]
    set_title(spec["title"])
    if spec["cores"] is not None:
        os.sched_setaffinity(0, spec["cores"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    used, out, *rest = fds
    os.close(used)
    os.close(out)
    leave(serve(spec, rest))


def serve(
    spec: Mapping[str, Any],
    fds: Sequence[int],
    resources: Mapping[str, tuple[str, ...]] | None = None,
    carriage: Carriage | None = None,
) -> int:
    """Be the worker of ``spec`` in this process, on its main thread; return the exit code.

    ``fds`` are those of :func:`main` from the control lane on; ``resources`` what a launcher
    assigned to this process (:attr:`hardpoint.rpc.worker_process.Boot.resources`), ``carriage``
    what carries steps beside the channel.
    """
    lane, boot, stacks, board, *rest = fds
    rendezvous = rest.pop(0) if spec["rendezvous"] else None
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True, chain=False)
    # What it is chained to is the signal's default action, which ends the process. Of this thread
    # alone: others of a process that is continued run meanwhile, and reading the frames of a thread
    # that runs may end the process before this one was written.
    faulthandler.register(LAST_STACK_SIGNAL, file=stacks, all_threads=False, chain=True)
    faulthandler.enable(all_threads=True)
    rank = spec["rank"]
    control = ControlThread(socket.socket(fileno=lane), spec["heartbeat"], rank=rank)
    # The thread that works takes that signal itself: were it another's to take, this one might do
    # some more work before.
    signal.pthread_sigmask(signal.SIG_BLOCK, {LAST_STACK_SIGNAL})
    control.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {LAST_STACK_SIGNAL})
    control.stage("boot")
    codec = encoding.codec_named(spec["codec"])
    orders = codec.decode(descriptors.contents(boot), "the worker's boot record")
    os.close(boot)
    if rendezvous is not None:
        orders = evolve(orders, rendezvous=f"{spec['rendezvous']}/proc/self/fd/{rendezvous}")
    orders = evolve(orders, resources=resources or {})
    handle = channel.WorkerHandle(fds=tuple(rest), data=spec["channel"])
    claims = WorkerClaims(board, orders.world_size, rank)
    attach = partial(channel.attach, handle, spec["place"], codec=codec)
    if carriage is None:
        return run(orders, attach, control, claims.begin, codec.learn)
    carried = partial(carriage.attach, attach, codec, control.cancelled)
    return run(orders, carried, control, claims.begin, codec.learn, carriage.stages)


def enter(folder: str) -> None:
    """Go to the driver's folder, unless this process began in it, as it does where the driver has
    not gone elsewhere: one that may not be entered again, or has no name any more (empty), is kept.
    """
    try:
        here = str(Path.cwd())
    except OSError:
        here = ""
    if folder not in ("", here):
        os.chdir(folder)


def leave(code: int) -> NoReturn:
    """End this process now: what a nursery's libraries arranged for an interpreter's end is not a
    worker's, and threads of libraries must not keep it.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
    os._exit(code)
