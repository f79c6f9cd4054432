"""The thread on which one engine computes, and how callers reach it.

Python raises KeyboardInterrupt between any two instructions of the main thread, and in no other.
So no caller touches the engine's state. Callers put commands into one queue and wait on another;
both are ``queue.SimpleQueue``, whose ``put`` and ``get`` happen whole or not at all. (An interrupt
inside ``threading.Condition`` may leave it locked.)
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from hardpoint.errors import ExecutorFailedError, HardpointError, LifecycleError

from hardpoint_engine.completion import Generation
from hardpoint_engine.request import EngineOutput, EngineRequest

if TYPE_CHECKING:
    from hardpoint_engine.async_call import AsyncCall
    from hardpoint_engine.core import EngineCore

_logger = logging.getLogger("hardpoint.engine")


class Call:
    """What one caller waits for: all of its ``generations``, or, ``stepwise``, the next news of its
    only one. An ``eager`` one is computed also while its caller does something else.
    """

    def __init__(
        self, generations: Sequence[Generation], *, stepwise: bool = False, eager: bool = False
    ) -> None:
        self.generations = generations
        self.open = {generation.request_id for generation in generations}
        self.eager = eager
        self._stepwise = stepwise
        self._bell: SimpleQueue[Exception | None] = SimpleQueue()

    @property
    def lasts(self) -> bool:
        """Whether its caller goes on waiting though there is news."""
        return bool(self.open) and (self.eager or not self._stepwise)

    @property
    def ready(self) -> bool:
        """Whether its caller need not wait any more."""
        if not self.open:
            return True
        return self._stepwise and self.generations[0].changed

    def ring(self, error: Exception | None = None) -> None:
        """Wake the caller, to look again or to raise ``error``."""
        if error is not None or self._bell.empty():
            self._bell.put(error)

    def sleep(self) -> None:
        """Wait for the bell. Raises the error that it was rung for."""
        error = self._bell.get()
        if error is not None:
            raise error


class EngineThread:
    """Takes in requests, steps ``core`` by itself as long as a caller waits, and sleeps else.

    Whatever a step raises reaches every waiting caller, once.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._pid = os.getpid()
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._calls: dict[str, tuple[Call, Generation]] = {}
        self._routes: dict[str, tuple[Call, Generation, int]] = {}
        self._waiting: dict[int, Call] = {}
        self._end: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="hardpoint-engine", daemon=True)

    def start(self) -> None:
        """Begin to work. Called once."""
        self._thread.start()

    # For callers: any thread, interruptible anywhere.

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child of the process that has the engine."""
        return os.getpid() != self._pid

    def require_own_process(self) -> None:
        """Raise LifecycleError in a forked child, where nothing of the engine runs."""
        if self.foreign:
            raise LifecycleError(
                f"this engine runs in process {self._pid} and cannot be used in its forked child "
                f"{os.getpid()}: start an engine in the child"
            )

    def submit(self, call: Call, requests: Sequence[Sequence[EngineRequest]]) -> None:
        """Queue ``requests``, checked ones, those of each generation of ``call``."""
        self._commands.put(partial(self._admit, call, requests))

    def wait(self, call: Call) -> None:
        """Return when ``call`` is ready. Raises what a step raised meanwhile."""
        while not call.ready:
            self._commands.put(partial(self._want, call))
            if self._end is not None:  # then perhaps nobody reads commands any more
                raise self._end
            call.sleep()

    async def wait_async(self, call: AsyncCall) -> None:
        """As :meth:`wait`, for a task. Nothing has to be asked for: the call is eager."""
        while not call.ready:
            if self._end is not None:
                raise self._end
            await call.sleep_async()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown and ended ones are let pass. Never waits."""
        self._commands.put(partial(self._abort_all, request_ids))

    def end(self, error: Exception) -> None:
        """Let the thread end after its step, and every open request by ``error``. Never waits."""
        self._end = self._end or error
        self._commands.put(_nothing)

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended. Does nothing on that thread itself."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    # On the thread.

    def _run(self) -> None:
        while self._end is None:
            self._obey()
            if (self._waiting and self._end is None) or self._has_last_words:
                self._step()
        self._fail_all(self._end)
        self._obey_rest()

    @property
    def _has_last_words(self) -> bool:
        """Whether a step would compute nothing more, but take what aborted requests leave."""
        return not len(self._core.scheduler.roster) and self._core.has_unfinished()

    def _obey(self) -> None:
        if not (self._waiting or self._has_last_words):
            self._commands.get()()
        self._obey_rest()

    def _obey_rest(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    def _admit(self, call: Call, requests: Sequence[Sequence[EngineRequest]]) -> None:
        for generation in call.generations:
            self._calls[generation.request_id] = (call, generation)
        if call.eager and call.open:
            self._waiting[id(call)] = call
        if self._end is not None:
            self._fail_all(self._end)
            return
        try:
            for generation, parts in zip(call.generations, requests, strict=True):
                for index, request in enumerate(parts):
                    self._core.add_request(request, checked=True)
                    self._routes[request.req_id] = (call, generation, index)
        except Exception as error:  # noqa: BLE001 - raised by the caller, who waits
            for generation in call.generations:
                generation.fail(error)
                self._abort(generation.request_id)

    def _want(self, call: Call) -> None:
        if call.ready:
            call.ring()
        elif self._end is not None:
            call.ring(self._end)
        else:
            self._waiting[id(call)] = call

    def _step(self) -> None:
        try:
            outputs = self._core.step(self._goes_on)
            if self._end is None:
                for output in outputs:
                    self._deliver(output)
                if not outputs and not self._core.has_unfinished():
                    self._fail_all(HardpointError("the engine lost the request without a word"))
        except Exception as error:
            if not self._core.alive:
                self._fail_all(error)
            elif not self._waiting:
                _logger.exception("a step failed, and nobody waits for it")
            waiting, self._waiting = self._waiting, {}
            for call in waiting.values():
                call.ring(error)

    def _goes_on(self, outputs: Sequence[EngineOutput]) -> bool:
        """Whether the next step is wanted whatever becomes of ``outputs``. Commands that have come
        are obeyed first, so that it is planned by them.
        """
        for output in outputs:
            route = self._routes.get(output.req_id)
            if output.finish_reason is not None or (route and route[1].ends_by_text):
                return False
        self._obey_rest()
        return self._end is None and any(call.lasts for call in self._waiting.values())

    def _deliver(self, output: EngineOutput) -> None:
        route = self._routes.get(output.req_id)
        if route is None:
            return
        call, generation, index = route
        if output.finish_reason is not None:
            del self._routes[output.req_id]
        try:
            stopped = generation.add(index, output)
        except Exception as error:  # noqa: BLE001 - it ends this request; its neighbours go on
            generation.fail(error)
            self._abort(generation.request_id)
            return
        if stopped:  # the engine's last word comes with the next step
            self._core.abort(output.req_id, "stop", generation.completions[index].stop_reason)
        self._look(call, generation)

    def _look(self, call: Call, generation: Generation) -> None:
        """Note the end of ``generation``, and wake who waited for what is there now."""
        if generation.finished:
            call.open.discard(generation.request_id)
            self._calls.pop(generation.request_id, None)
        if not call.ready or id(call) not in self._waiting:
            return
        if not call.eager or not call.open:
            del self._waiting[id(call)]
        call.ring()

    def _abort_all(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        if request_id not in self._calls:
            return
        call, generation = self._calls[request_id]
        count = len(generation.completions)
        for index in range(count):
            req_id = part_id(request_id, index, count)
            if self._routes.pop(req_id, None) is not None:
                self._core.abort(req_id)
        generation.end("abort")
        self._look(call, generation)

    def _fail_all(self, error: BaseException) -> None:
        self._routes.clear()
        for call, generation in list(self._calls.values()):
            generation.fail(error)
            self._look(call, generation)


def part_id(request_id: str, index: int, count: int) -> str:
    """Return the engine's id of answer ``index`` of a request with ``count`` answers."""
    return request_id if count == 1 else f"{request_id}-{index}"


def stopped_engine() -> ExecutorFailedError:
    """Return what the open requests of an engine end by when it is shut down."""
    return ExecutorFailedError("the engine was shut down; start a new one")


def _nothing() -> None:
    """Wake the thread."""
