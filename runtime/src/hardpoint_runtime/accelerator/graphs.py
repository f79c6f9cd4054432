"""Graphs of the device itself: captured from a stream, replayed by one launch.

A capture runs the function on a stream of its own: its kernels are noted, not executed. What it
allocates comes from a private pool, which the graphs of a runner share; so larger ones are captured
first, and of all of them only the one replayed last has its results. Before that, the function and
its rehearsal are compared as lists of operations, which also refuses by name what depends on values
or on the host.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any

from attrs import define, frozen

from hardpoint_runtime.graphs.errors import GraphCaptureError
from hardpoint_runtime.graphs.recording import record, require_same

if TYPE_CHECKING:
    from hardpoint_runtime.accelerator.device import AcceleratorDeviceOps


@define(eq=False)
class DeviceGraphPool:
    """The private memory of graphs captured with it, and the stream that they are captured on.

    Made by ``AcceleratorDeviceOps.graph_pool``. ``handle`` is the device's name for it, None before
    the first capture.
    """

    device: AcceleratorDeviceOps
    handle: Any = None
    stream: Any = None


@frozen(kw_only=True, eq=False)
class DeviceGraph:
    """One captured graph of the device. ``output`` is where a replay leaves its results."""

    key: Hashable
    graph: Any
    pool: DeviceGraphPool
    output: Any

    def replay(self) -> Any:
        """Launch it; return :attr:`output`, valid until the next replay of its pool."""
        self.graph.replay()
        return self.output


_living: weakref.WeakSet[DeviceGraph] = weakref.WeakSet()


def any_living() -> bool:
    """Whether this process holds a graph of a device, of whatever runner."""
    return len(_living) > 0


def capture(
    device: AcceleratorDeviceOps,
    function: Callable[[], Any],
    key: Hashable,
    pool: DeviceGraphPool,
    rehearsal: Callable[[], Any] | None,
) -> DeviceGraph:
    """Return the work of ``function`` as a graph. Called by ``AcceleratorDeviceOps.capture``.

    Raises GraphCaptureError for work that would not be the same again, and for work that the
    device does not capture.
    """
    if rehearsal is not None:
        require_same(record(function), record(rehearsal))
    if pool.stream is None:
        pool.stream = device.stream()
    graph = device.make_graph()
    device.synchronize()
    current = device.current_stream()
    with _uncollected(), pool.stream:
        output = _captured(graph, function, key, pool)
    current.wait_stream(pool.stream)
    if pool.handle is None:
        pool.handle = graph.pool()
    captured = DeviceGraph(key=key, graph=graph, pool=pool, output=output)
    _living.add(captured)
    return captured


def _captured(graph: Any, function: Callable[[], Any], key: Hashable, pool: DeviceGraphPool) -> Any:
    graph.capture_begin(**_manner(graph, pool))
    try:
        output = function()
    except BaseException as error:
        _abandon(graph)
        if not isinstance(error, RuntimeError):
            raise
        raise GraphCaptureError(f"the device does not capture {key}: {error}") from error
    graph.capture_end()
    return output


def _manner(graph: Any, pool: DeviceGraphPool) -> dict[str, Any]:
    """Return how a capture begins. What other threads ask of the device meanwhile, as watchdogs of
    collective libraries do, is no part of it and does not end it, where the graph can tell.
    """
    manner: dict[str, Any] = {} if pool.handle is None else {"pool": pool.handle}
    if "capture_error_mode" in inspect.signature(graph.capture_begin).parameters:
        manner["capture_error_mode"] = "thread_local"
    return manner


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Let no cycle be collected meanwhile: it might be an engine that is gone, whose memory the
    device gives back only after waiting, which no capture survives.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _abandon(graph: Any) -> None:
    """End a capture that failed, so that the stream can be used again; whatever ending it says is
    a consequence.
    """
    with contextlib.suppress(RuntimeError):
        graph.capture_end()
