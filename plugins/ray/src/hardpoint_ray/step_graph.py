"""The driver's side of the compiled graph: steps go in, the output rank's answers come out.

The graph is a row of stages, in each the actors of its ranks: all get the step, and a rank of a
later stage also what the rank in its place before has handed on. Ray runs it in the order in which
steps are given. Their arguments and answers go by it; their order among other calls, errors, and
what other ranks acknowledge, by the channel.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from attrs import evolve, frozen
from hardpoint.errors import ExecutorFailedError, HardpointError
from hardpoint.isolation import text_of
from hardpoint.rpc.calls import Call, CallTable
from hardpoint.rpc.channel import ChannelClosedError
from hardpoint.rpc.encoding import Codec
from ray.dag import InputNode, MultiOutputNode

from hardpoint_ray.frames import joined, parted, size_of
from hardpoint_ray.step_line import LARGEST, MARK

GRACE_SECONDS = 5.0
"""How long a graph that broke waits for the word on the actor by which it did."""
FOR_EVER = -1

_RAYS_LOGGER = logging.getLogger("ray.dag.compiled_dag_node")


class _Quiet(logging.Filter):
    """Drops what Ray says of a graph whose actors have ended: how they did is told elsewhere; and
    what it says of ``thread``, on which one is being ended.
    """

    thread: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread == self.thread and record.levelno <= logging.INFO:
            return False
        return record.msg != "Error cancelling worker task"


@frozen(kw_only=True)
class Shape:
    """The ranks of each stage, in their order; ``depth`` is how many steps are in the graph at
    most.
    """

    stages: tuple[tuple[int, ...], ...]
    depth: int
    output_rank: int

    @property
    def answers(self) -> bool:
        """Whether the output rank is in the last stage, so that its values come by the graph."""
        return self.output_rank in self.stages[-1]


class StepGraph:
    """Compiled for ``actors``, one a rank, before any of them is at work; :meth:`close` ends it
    once they have ended.

    ``failed(error)`` is called when the graph breaks, on a thread of its own.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        shape: Shape,
        codec: Codec,
        calls: CallTable,
        failed: Callable[[HardpointError], None],
    ) -> None:
        self._shape = shape
        self._codec = codec
        self._calls = calls
        self._failed = failed
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Call, bytes]] = deque()
        self._running: deque[tuple[Call, list[Any]]] = deque()
        self._closed = False
        self.steps = 0
        """How many steps were given to the graph."""
        self._quiet = _Quiet()
        _RAYS_LOGGER.addFilter(self._quiet)
        self._graph: Any = compiled(actors, shape)
        self._thread = threading.Thread(
            target=self._collect, name="hardpoint-ray-graph", daemon=True
        )
        self._thread.start()

    def send(self, call: Call, order: Callable[[Call], None]) -> None:
        """Send a step: its arguments by the graph, and by ``order`` that it is its turn."""
        data, buffers = self._codec.encode_call(call)
        number = call.call_id.to_bytes(8, "little")
        turn = evolve(call, method=f"{MARK}{call.method}")
        if size_of((data, *buffers)) <= LARGEST:
            step = joined((number, data, *buffers))
            turn = evolve(turn, args=(), kwargs={})
        else:
            step = joined((number,))
        with self._sending:
            order(turn)
            with self._changed:
                self._waiting.append((call, step))
                self._start()

    def close(self) -> None:
        """End the graph, whose actors have ended. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._quiet.thread = threading.get_ident()
        self._graph.teardown()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._running.clear()
        self._graph = None
        _RAYS_LOGGER.removeFilter(self._quiet)

    def _start(self) -> None:
        """Give the graph the steps for which it has room. Under the lock."""
        while self._waiting and len(self._running) < self._shape.depth and not self._closed:
            call, step = self._waiting.popleft()
            try:
                answers = self._graph.execute(step)
            except Exception as error:
                threading.Thread(target=self._broke, args=(error,), daemon=True).start()
                raise ChannelClosedError(f"Ray's graph takes no step: {text_of(error)}") from error
            self.steps += 1
            self._running.append((call, answers))
            self._changed.notify_all()

    def _collect(self) -> None:
        """Take what comes out of the graph, in order."""
        while True:
            with self._changed:
                while not self._running and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                call, answers = self._running[0]
            try:
                found = [answer.get(timeout=FOR_EVER) for answer in answers]
                with self._changed:
                    self._running.popleft()
                    self._start()
            except Exception as error:  # noqa: BLE001 - told to who is to be told
                self._broke(error)
                return
            self._deliver(call, found)

    def _deliver(self, call: Call, found: Sequence[bytes]) -> None:
        shape = self._shape
        if not shape.answers:
            return
        for rank, answer in zip(shape.stages[-1], found, strict=True):
            pieces = parted(answer)
            if pieces:  # else it acknowledges by the channel
                data, *buffers = pieces
                value = self._codec.parcel(bytes(data), buffers)
                self._calls.acknowledge(call.call_id, rank, call.generation, value)

    def _broke(self, error: Exception) -> None:
        """Fail by ``error``, unless somebody fails or closes the group by its cause meanwhile."""
        with self._changed:
            if self._changed.wait_for(lambda: self._closed, GRACE_SECONDS):
                return
        failure = ExecutorFailedError(f"the compiled graph of Ray broke: {text_of(error)}")
        failure.__cause__ = error
        self._failed(failure)


def compiled(actors: Sequence[Any], shape: Shape) -> Any:
    """Return the graph over ``actors``, compiled."""
    with InputNode() as step:
        before: list[Any] = []
        for stage in shape.stages:
            inputs = [(step, each) for each in before] or [(step,)] * len(stage)
            before = [
                actors[rank].step.bind(*given) for rank, given in zip(stage, inputs, strict=True)
            ]
        graph = MultiOutputNode(before)
    made = graph.experimental_compile(
        _submit_timeout=FOR_EVER, _max_inflight_executions=shape.depth + 1
    )
    # Ray 2.60 registers the driver at the first read, or when the graph ends, and aborts the driver
    # if the actor whose channel it is has gone by then. To go when ``start`` of its reader does it.
    for channel in made.dag_output_channels:
        channel.ensure_registered_as_reader()
    return made


def shape_of(world_size: int, stages: int, depth: int, output_rank: int) -> Shape:
    """Return the stages of ``world_size`` ranks: one after the other, as many ranks in each; one
    stage for a number that cannot be divided so.
    """
    count = stages if world_size % stages == 0 else 1
    each = world_size // count
    rows = tuple(tuple(range(stage * each, (stage + 1) * each)) for stage in range(count))
    return Shape(stages=rows, depth=depth, output_rank=output_rank)
