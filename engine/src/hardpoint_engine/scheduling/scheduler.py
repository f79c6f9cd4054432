"""Decides what runs in each step: continuous batching over a token budget and a pool of KV blocks.

Rules. Running requests go on before waiting ones start; both are ordered by (priority, arrival).
Every running request that generates gets its token before prompts get the rest of the budget. A
prompt is computed in chunks. When blocks run out, the last running request loses all of its own
and waits to be computed again from its tokens, much of it from the prefix cache. The first
running request is never preempted for another's sake and fits the pool by itself, so it ends;
nobody overtakes a request that lacks room; so every request ends.

Several steps may be in flight. A request is in one of them at most, keeps its blocks until that
step has landed, and is not preempted meanwhile; what runs is shared out evenly, so that no stage
of a pipeline waits while another has all the work.

Pure: no I/O, no threads; the clock is an argument. The engine core holds a lock around every call.
A step's cost is linear in the requests it holds and does not depend on how many wait.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from hardpoint.errors import HardpointError, InvalidRequestError
from hardpoint.messages import ModelRunnerOutput, NewRequestData, SchedulerOutput

from hardpoint_engine.request import EngineOutput, Request
from hardpoint_engine.scheduling.admission import (
    AdmissionPolicy,
    Admit,
    Decision,
    OpenAdmission,
    Refuse,
    RequestInfo,
    RunningRequests,
    Wait,
)
from hardpoint_engine.scheduling.kv_blocks import KVBlocks
from hardpoint_engine.scheduling.results import Results
from hardpoint_engine.scheduling.roster import Roster
from hardpoint_engine.scheduling.step_draft import StepDraft, StepLimits


class AdmissionError(HardpointError):
    """An admission policy raised; what it raised is ``__cause__``.

    What to do: read ``__cause__``; mend the policy, or take another by ``admission``.
    """


class Scheduler:
    """Plans steps for the live requests of ``roster`` and takes in their results.

    ``num_groups`` is the number of KV cache groups, which all use the same block ids. ``clock()``
    gives monotonic seconds. At most ``depth`` steps are in flight: each ``schedule`` that gave a
    plan is followed, in the order of the plans, by its ``commit`` or ``fail``. ``tells_tokens``:
    some workers do not sample and must be told what was chosen (a pipeline's earlier stages).
    ``processors`` names what changes logits besides the requests.
    """

    def __init__(
        self,
        limits: StepLimits,
        blocks: KVBlocks,
        *,
        clock: Callable[[], float],
        num_groups: int = 1,
        admission: AdmissionPolicy | None = None,
        depth: int = 1,
        tells_tokens: bool = False,
        processors: tuple[str, ...] = (),
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self.num_groups = num_groups
        self.clock = clock
        self.admission = admission or OpenAdmission()
        self.depth = depth
        self.tells_tokens = tells_tokens
        self.roster = Roster(blocks, clock)
        self._results = Results(self.roster, blocks, clock, processors)
        self._step_ids = itertools.count(1)

    def preempt_all(self) -> None:
        """Take the blocks of all running requests: the cache's contents are gone. No step may be in
        flight.
        """
        while running := self.roster.running:
            self.roster.preempt(running[-1])

    def schedule(self) -> SchedulerOutput | None:
        """Plan a step, or return None if nothing can run now: nobody is there, a policy says wait,
        or all that could run are in flight.
        """
        limits, roster = self.limits, self.roster
        most = limits.max_prefills_per_step
        draft = StepDraft(
            room=limits.max_num_batched_tokens, prefills=math.inf if most is None else most
        )
        ready = roster.not_in_flight()
        decodes = limits.mixed_batches
        if self._continue(draft, ready, decodes=decodes, prefills=True) and self._has_seats():
            self._admit(draft)
        if not limits.mixed_batches and not draft.num_tokens:
            self._continue(draft, ready, decodes=True, prefills=False)
        if not draft.num_tokens:
            return None
        plan = draft.output(
            next(self._step_ids),
            roster.take_finished(),
            roster.take_preempted(),
            self._untold(draft) if self.tells_tokens else (),
        )
        roster.in_flight[plan.step_id] = draft.requests
        return plan

    def _share(self, count: int) -> int:
        """Return how many of ``count`` requests one step takes."""
        return count if self.depth == 1 else -(-count // self.depth)

    def _untold(self, draft: StepDraft) -> tuple[tuple[int, ...], ...]:
        """Return, for each running request of the plan, its tokens that no plan has had yet."""
        untold = []
        for req_id in draft.req_ids:
            request = draft.requests[req_id]
            untold.append(tuple(request.tokens[request.num_told :]))
            request.num_told = len(request.tokens)
        return tuple(untold)

    # Requests that run already.

    def _continue(
        self, draft: StepDraft, ready: list[Request], *, decodes: bool, prefills: bool
    ) -> bool:
        """Plan the next tokens of those of ``ready`` (running, not in flight, best first) that this
        step takes; False if one lacked room, so that nobody may start before it goes on.
        """
        before = self.roster.num_preemptions
        seats = self._share(len(self.roster.running))
        unserved = min(_count_decoding(ready), seats) if decodes else 0
        requests, num_tokens, room = draft.requests, draft.num_tokens, draft.room
        index = 0
        while index < len(ready) and seats > 0:
            request = ready[index]
            index += 1
            computed = request.num_computed
            if computed >= request.prefill_until:
                if not decodes or room <= 0:
                    continue
                unserved -= 1
                count = 1
            else:
                count = self._next_chunk(request, draft, room - unserved) if prefills else 0
                if not count:
                    continue
            added: tuple[int, ...] | None = ()
            if computed + count > request.capacity:
                added = self._make_room(request, computed + count, ready)
                if added is None:
                    draft.room = room
                    return False
            req_id = request.source.req_id
            requests[req_id] = request
            draft.req_ids.append(req_id)
            draft.new_blocks.append((added,) * self.num_groups if added else None)
            draft.num_computed.append(computed)
            draft.num_output.append(len(request.tokens) - request.num_prompt)
            num_tokens[req_id] = count
            room -= count
            seats -= 1
        draft.room = room
        return self.roster.num_preemptions == before

    def _next_chunk(self, request: Request, draft: StepDraft, room: int) -> int:
        """Return how much of a running request's prompt to compute now, of at most ``room`` tokens:
        the rest of the step is for those that generate.
        """
        if draft.prefills < 1:
            return 0
        wanted = len(request.tokens) - request.num_computed
        count = self.limits.chunk(wanted, room)
        if count:
            draft.prefills -= 1
        return count

    def _make_room(
        self, request: Request, num_tokens: int, ready: list[Request]
    ) -> tuple[int, ...] | None:
        """Cover ``num_tokens`` of a running request, preempting from the last of ``ready``; None if
        it must wait.

        One that is itself the last loses its own blocks, but for a step in flight, whose end may
        free what it lacks.
        """
        roster = self.roster
        while (added := self.blocks.cover(request, num_tokens)) is None:
            victim = ready[-1]
            if victim is request and roster.in_flight:
                return None
            if ready is not roster.running:
                ready.pop()
            roster.preempt(victim)
            if victim is request:
                return None
        return added

    # Requests that wait.

    def _admit(self, draft: StepDraft) -> None:
        roster, waiting = self.roster, self.roster.waiting
        could_run = min(len(roster.running) + len(waiting), self.limits.most_running)
        seats = self._share(could_run)
        held_back: list[Request] = []
        while (
            len(draft.num_tokens) < seats
            and self._may_admit(draft)
            and len(held_back) < self.limits.max_num_seqs
        ):
            request = waiting.best()
            if request is None:
                break
            decision = self._decide(request)
            if isinstance(decision, Wait):
                held_back.append(waiting.take())
            elif isinstance(decision, Refuse):
                self._turn_away(request, decision.reason)
            elif isinstance(decision, Admit) and not self._start(request, draft):
                break
        for request in held_back:
            waiting.add(request)

    def _has_seats(self) -> bool:
        """Whether somebody waits and there is a seat."""
        roster = self.roster
        return len(roster.running) < self.limits.most_running and len(roster.waiting) > 0

    def _may_admit(self, draft: StepDraft) -> bool:
        return (
            len(self.roster.running) < self.limits.most_running
            and draft.room > 0
            and draft.prefills >= 1
            and self.blocks.pool.num_free > 0
        )

    def _decide(self, request: Request) -> Decision | None:
        """Ask the policy; None if it failed, which has ended the request."""
        if type(self.admission) is OpenAdmission:
            return Admit()
        try:
            running = RunningRequests(self.roster.running)
            decision = self.admission.admit(RequestInfo.of(request), running)
        except Exception as cause:  # noqa: BLE001 - a plugin's fault ends one request
            self._blame_policy(request, f"raised {cause!r}", cause)
            return None
        if not isinstance(decision, Admit | Wait | Refuse):
            self._blame_policy(request, f"returned {decision!r}, not Admit, Wait or Refuse")
            return None
        return decision

    def _blame_policy(self, request: Request, what: str, cause: Exception | None = None) -> None:
        policy = type(self.admission).__qualname__
        error = AdmissionError(f"admission policy {policy} {what} for request {request.req_id}")
        error.__cause__ = cause
        self.roster.end(request.req_id, "error", error=error)

    def _turn_away(self, request: Request, reason: str) -> None:
        error = InvalidRequestError(f"request {request.req_id} was turned away: {reason}")
        self.roster.end(request.req_id, "error", error=error)

    def _start(self, request: Request, draft: StepDraft) -> bool:
        """Plan the first chunk of the best waiting request; False if there is no room for it now.

        All of its known tokens must fit beside the running requests, though only the chunk's blocks
        are taken. One that was preempted needs a spare block for each running request as well, or
        it would soon be preempted again.
        """
        blocks = self.blocks
        found = blocks.find(request)
        known = len(request.tokens)
        computed = len(found) * blocks.block_size
        count = self.limits.chunk(known - computed, draft.room)
        headroom = len(self.roster.running) if request.num_preemptions else 0
        if not count or not blocks.fits(known, found, headroom):
            return False
        blocks.adopt(request, found)
        blocks.cover(request, computed + count)
        request.prefill_until = known
        self.roster.start(request)
        draft.requests[request.req_id] = request
        draft.num_tokens[request.req_id] = count
        draft.room -= count
        draft.prefills -= 1
        if request.at_workers:
            self._describe_resumed(request, draft)
        else:
            self._describe_new(request, draft)
        return True

    def _describe_resumed(self, request: Request, draft: StepDraft) -> None:
        self.roster.resumed(request.req_id)
        draft.req_ids.append(request.req_id)
        draft.new_blocks.append((tuple(request.blocks),) * self.num_groups)
        draft.num_computed.append(request.num_computed)
        draft.num_output.append(request.num_output)
        draft.resumed.add(request.req_id)

    def _describe_new(self, request: Request, draft: StepDraft) -> None:
        source = request.source
        request.at_workers = True
        request.num_told = len(request.tokens)
        draft.new.append(
            NewRequestData(
                req_id=source.req_id,
                prompt=source.prompt,
                sampling=source.sampling,
                block_ids=(tuple(request.blocks),) * self.num_groups,
                num_computed=request.num_computed,
                prefill_tokens=tuple(request.tokens) if request.num_output else None,
                lora=source.lora,
                prompt_adapter=source.prompt_adapter,
                pooling=source.pooling,
                extra=source.extra,
            )
        )

    # Results.

    def commit(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineOutput]:
        """Take in the result of a step in flight, the oldest; return one output for each request
        that has new tokens or ends. A result that contradicts the plan for one request, or has no
        numbers for it, ends that one alone.

        Raises MessageError, changing nothing, if it is not a result of this step at all.
        """
        return self._results.commit(plan, output)

    def fail(self, plan: SchedulerOutput, error: BaseException) -> list[EngineOutput]:
        """End the requests of a step in flight with its error. What the workers should have learnt
        from ``plan`` about ended requests is said again with the next one.
        """
        return self._results.fail(plan, error)


def _count_decoding(requests: list[Request]) -> int:
    return sum([1 for request in requests if request.num_computed >= request.prefill_until])
