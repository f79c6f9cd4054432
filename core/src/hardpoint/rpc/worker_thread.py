"""The thread on which a worker of the driver's own process lives, and all that must be given back
with it.

It knows nothing of the executor, so an executor that nobody holds any more can be collected while
the thread waits for work.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from hardpoint.errors import ExecutorFailedError
from hardpoint.isolation import log_error
from hardpoint.records import WorkerHealth
from hardpoint.rpc.calls import CallTable, PackedCall
from hardpoint.rpc.deadlines import Deadlines
from hardpoint.rpc.host import WorkerHost

_logger = logging.getLogger("hardpoint.executor")

RELEASE_SECONDS = 1.0
"""How long an abandoned executor's worker is waited for, at collection or interpreter exit."""


class WorkerThread:
    """Builds a worker host on a thread of its own and serves calls there, in order of arrival.

    ``build(cancelled)`` makes the host. ``died(error)`` is called if the loop itself fails, which
    only a defect can cause. ``serve(host, call)`` has the host answer one call; by default the
    answer goes to ``calls``, and a call that nobody wants any more is dropped.
    """

    def __init__(
        self,
        build: Callable[[Callable[[], bool]], WorkerHost],
        calls: CallTable,
        deadlines: Deadlines,
        died: Callable[[BaseException], None],
        serve: Callable[[WorkerHost, PackedCall], None] | None = None,
        name: str = "hardpoint-uni",
    ) -> None:
        self._answer = serve
        self._build = build
        self._calls = calls
        self._deadlines = deadlines
        self._died = died
        self._queue: SimpleQueue[PackedCall | None] = SimpleQueue()
        self._stopping = threading.Event()
        self._built: Future[None] = Future()
        self._host: WorkerHost | None = None
        # A daemon, so that a worker stuck in a call cannot keep the interpreter from ending.
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread and wait for the worker to be built; raise what building it raised."""
        self._thread.start()
        self._built.result()

    def submit(self, call: PackedCall) -> None:
        """Queue a call."""
        self._queue.put(call)

    def health(self) -> WorkerHealth | None:
        """Return the worker's progress, or None if the thread does not run."""
        if self._host is None or not self._thread.is_alive():
            return None
        return self._host.health()

    @property
    def host(self) -> WorkerHost | None:
        """The host, once it is built."""
        return self._host

    def is_current(self) -> bool:
        """Whether the calling thread is this one."""
        return threading.current_thread() is self._thread

    def stop(self, deadline: float) -> bool:
        """Ask the worker to leave its work, run no queued call, shut the worker down; return
        whether that was done by ``deadline`` (monotonic s). Idempotent.
        """
        self._stopping.set()
        self._queue.put(None)
        if self.is_current():
            return False
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def release(self) -> None:
        """Stop for an executor that was collected, or that the interpreter's end found running."""
        self.stop(time.monotonic() + RELEASE_SECONDS)
        self._deadlines.close()
        self._calls.fail_all(ExecutorFailedError("the executor was dropped without shutdown()"))

    def _live(self) -> None:
        build, self._build = self._build, _already_built
        try:
            self._host = host = build(self._stopping.is_set)
        except BaseException as error:  # noqa: BLE001 - raised again where start() waits
            self._built.set_exception(error)
            return
        self._built.set_result(None)
        try:
            self._serve(host)
        except BaseException as error:  # noqa: BLE001 - the executor fails by it
            self._died(error)
            log_error(_logger, "the worker thread failed", error)
        finally:
            host.close()

    def _serve(self, host: WorkerHost) -> None:
        while not self._stopping.is_set():
            call = self._queue.get()
            if call is None:
                continue
            if self._answer is not None:
                self._answer(host, call)
            elif self._calls.begin(call.call_id):
                self._calls.deliver(host.handle(call))
            del call  # hold no arguments while waiting


def _already_built(cancelled: Callable[[], bool]) -> WorkerHost:
    raise RuntimeError("a worker thread lives once")
