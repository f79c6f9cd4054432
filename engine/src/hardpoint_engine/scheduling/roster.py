"""The live requests of one engine: who waits, who runs, who ended, and what the workers must hear
of it.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from itertools import chain
from operator import attrgetter

from hardpoint.messages import Logprobs, SchedulerOutput

from hardpoint_engine.request import EngineOutput, EngineRequest, Phase, Request
from hardpoint_engine.scheduling.kv_blocks import KVBlocks
from hardpoint_engine.scheduling.stopping import FinishReason, StopRule
from hardpoint_engine.scheduling.waiting import WaitingQueue

_rank = attrgetter("rank")


class Roster:
    """Keeps every live request in exactly one of ``waiting`` and ``running`` (best first), unless
    it is still being prepared, and ends each exactly once. ``running`` is one list object for good.
    ``in_flight`` maps the number of each step that the workers have to its requests; one that has
    ended meanwhile keeps its blocks until the step has landed, for the workers may still write
    them.
    """

    def __init__(self, blocks: KVBlocks, clock: Callable[[], float]) -> None:
        self.blocks = blocks
        self.clock = clock
        self.running: list[Request] = []
        self.waiting = WaitingQueue()
        self.in_flight: dict[int, dict[str, Request]] = {}
        self.num_preemptions = 0
        self._requests: dict[str, Request] = {}
        self._finished: set[str] = set()
        self._preempted: set[str] = set()
        self._ended: list[EngineOutput] = []
        self._ordinals = itertools.count()

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def has_outputs(self) -> bool:
        """Whether ``take_ended`` has something to give."""
        return bool(self._ended)

    def take_ended(self) -> list[EngineOutput]:
        """Return, once, the last outputs of requests that ended outside a step's result."""
        ended, self._ended = self._ended, []
        return ended

    def add(self, source: EngineRequest, rule: StopRule, *, ready: bool = True) -> Request:
        """Let a checked request wait; not ``ready``: once it is :meth:`prepared`. The core has seen
        to its seed and to its id being free.
        """
        request = Request.of(source, next(self._ordinals), rule)
        self._requests[request.req_id] = request
        if ready:
            self.waiting.add(request)
        else:
            request.phase = Phase.PREPARING
        return request

    def prepared(self, request: Request) -> None:
        """Let a request wait for its turn, in the order of its arrival."""
        self.waiting.add(request)

    def start(self, request: Request) -> None:
        """Let the best waiting request run; its blocks are its own already."""
        self.waiting.take()
        request.phase = Phase.RUNNING
        if request.first_scheduled is None:
            request.first_scheduled = self.clock()
            request.num_cached = request.num_computed
        bisect.insort(self.running, request, key=_rank)

    def not_in_flight(self) -> list[Request]:
        """Return the running requests that no step has: ``running`` itself where none is in flight,
        else a list of its own.
        """
        if not self.in_flight:
            return self.running
        busy = set(chain.from_iterable(self.in_flight.values()))
        return [request for request in self.running if request.source.req_id not in busy]

    def preempt(self, victim: Request) -> None:
        """Take the blocks of a running request that is not in flight, and let it wait."""
        self._drop_running(victim)
        self.blocks.release(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._preempted.add(victim.req_id)
        self.waiting.add(victim)

    def resumed(self, req_id: str) -> None:
        """Note that a preempted request is in the plan again, with new blocks."""
        self._preempted.discard(req_id)

    def end(
        self,
        req_id: str,
        reason: FinishReason,
        *,
        stop_reason: int | str | None = None,
        error: BaseException | None = None,
    ) -> bool:
        """End a request in whatever state; False if there is no such live request. Its last output
        comes by ``take_ended``; what a step in flight still gives it is dropped.
        """
        request = self._requests.get(req_id)
        if request is None:
            return False
        if request.phase is Phase.RUNNING:
            self._drop_running(request)
        self._ended.append(self.finish(request, reason, stop_reason=stop_reason, error=error))
        return True

    def end_all(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """End every live request."""
        for req_id in list(self._requests):
            self.end(req_id, reason, error=error)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        new_tokens: tuple[int, ...] = (),
        logprobs: Logprobs | None = None,
        prompt_logprobs: Logprobs | None = None,
        stop_reason: int | str | None = None,
        error: BaseException | None = None,
    ) -> EngineOutput:
        """End the account of a live request and return its last output. One that ran stays in
        ``running`` until ``sweep``.
        """
        if request.phase is Phase.WAITING:
            self.waiting.remove(request, Phase.FINISHED)
        request.phase = Phase.FINISHED
        if not self._is_in_flight(request):
            self.blocks.release(request)
        del self._requests[request.req_id]
        self._preempted.discard(request.req_id)
        if request.at_workers:
            self._finished.add(request.req_id)
        return EngineOutput(
            req_id=request.req_id,
            new_tokens=new_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            error=error,
            metrics=request.metrics_at(self.clock()),
        )

    def _is_in_flight(self, request: Request) -> bool:
        return any(step.get(request.req_id) is request for step in self.in_flight.values())

    def _drop_running(self, request: Request) -> None:
        running = self.running
        if running[-1] is request:
            running.pop()
        else:
            del running[bisect.bisect_left(running, request.rank, key=_rank)]

    def sweep(self) -> None:
        """Drop ended requests from ``running``."""
        self.running[:] = [request for request in self.running if request.phase is Phase.RUNNING]

    def take_finished(self) -> frozenset[str]:
        """Return, once, the ids that the workers shall forget."""
        finished, self._finished = frozenset(self._finished), set()
        return finished

    def take_preempted(self) -> frozenset[str]:
        """Return, once, the ids that lost their blocks and are not in the plan."""
        preempted, self._preempted = frozenset(self._preempted), set()
        return preempted

    def say_again(self, plan: SchedulerOutput) -> None:
        """Tell the workers with the next plan what they may have missed of a failed one, but for
        what a later plan has overtaken.
        """
        live = self._requests
        for req_id in plan.finished:
            if req_id not in live or not live[req_id].at_workers:
                self._finished.add(req_id)
        for req_id in plan.preempted:
            if req_id in live and live[req_id].phase is Phase.WAITING:
                self._preempted.add(req_id)
