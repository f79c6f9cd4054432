"""Decides what runs in each step: continuous batching over a token budget and a pool of KV blocks.

Rules. Running requests go on before waiting ones start; both are ordered by (priority, arrival).
Every running request that generates gets its token before prompts get the rest of the budget. A
prompt is computed in chunks. When blocks run out, the last running request loses all of its own
and waits to be computed again from its tokens, much of it from the prefix cache. The first
running request is never preempted for another's sake and fits the pool by itself, so it ends;
nobody overtakes a request that lacks room; so every request ends.

Pure: no I/O, no threads; the clock is an argument. The engine core holds a lock around every call.
A step's cost is linear in the requests it holds and does not depend on how many wait.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable

from hardpoint.errors import HardpointError, InvalidRequestError
from hardpoint.messages import MessageError, ModelRunnerOutput, NewRequestData, SchedulerOutput

from hardpoint_engine.request import EngineOutput, Phase, Request
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
from hardpoint_engine.scheduling.roster import Roster
from hardpoint_engine.scheduling.step_draft import StepDraft, StepLimits
from hardpoint_engine.scheduling.stopping import Stop


class AdmissionError(HardpointError):
    """An admission policy raised; what it raised is ``__cause__``."""


class NoNumbersError(HardpointError):
    """The model gave NaN or infinity for a request's next token."""


class Scheduler:
    """Plans steps for the live requests of ``roster`` and takes in their results.

    ``num_groups`` is the number of KV cache groups, which all use the same block ids. ``clock()``
    gives monotonic seconds. One step is in flight at a time: ``schedule``, then ``commit`` or
    ``fail``.
    """

    def __init__(
        self,
        limits: StepLimits,
        blocks: KVBlocks,
        *,
        clock: Callable[[], float],
        num_groups: int = 1,
        admission: AdmissionPolicy | None = None,
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self.num_groups = num_groups
        self.clock = clock
        self.admission = admission or OpenAdmission()
        self.roster = Roster(blocks, clock)
        self._in_step: dict[str, Request] = {}
        self._step_ids = itertools.count(1)

    def preempt_all(self) -> None:
        """Take the blocks of all running requests: the cache's contents are gone. No step may be in
        flight.
        """
        while self.roster.running:
            self.roster.preempt_last()

    def schedule(self) -> SchedulerOutput | None:
        """Plan a step, or return None if nothing can run now: nobody is there, or a policy says
        wait.
        """
        limits, roster = self.limits, self.roster
        most = limits.max_prefills_per_step
        draft = StepDraft(
            room=limits.max_num_batched_tokens, prefills=math.inf if most is None else most
        )
        before = roster.num_preemptions
        self._continue(draft, decodes=limits.mixed_batches, prefills=True)
        if roster.num_preemptions == before:
            self._admit(draft)
        if not limits.mixed_batches and not draft.num_tokens:
            self._continue(draft, decodes=True, prefills=False)
        if not draft.num_tokens:
            return None
        self._in_step = draft.requests
        return draft.output(next(self._step_ids), roster.take_finished(), roster.take_preempted())

    # Requests that run already.

    def _continue(self, draft: StepDraft, *, decodes: bool, prefills: bool) -> None:
        running = self.roster.running
        unserved = self._count_decoding() if decodes else 0
        index = 0
        while index < len(running):
            request = running[index]
            index += 1
            computed = request.num_computed
            if computed >= request.prefill_until:
                if not decodes or draft.room <= 0:
                    continue
                unserved -= 1
                count = 1
            else:
                count = self._next_chunk(request, draft, unserved) if prefills else 0
                if not count:
                    continue
            added: tuple[int, ...] | None = ()
            if computed + count > request.capacity:
                added = self._make_room(request, computed + count)
                if added is None:
                    return
            req_id = request.source.req_id
            draft.requests[req_id] = request
            draft.req_ids.append(req_id)
            draft.new_blocks.append((added,) * self.num_groups if added else None)
            draft.num_computed.append(computed)
            draft.num_output.append(len(request.tokens) - request.num_prompt)
            draft.num_tokens[req_id] = count
            draft.room -= count

    def _count_decoding(self) -> int:
        running = self.roster.running
        return sum([1 for request in running if request.num_computed >= request.prefill_until])

    def _next_chunk(self, request: Request, draft: StepDraft, reserve: int) -> int:
        """Return how much of a running request's prompt to compute now, keeping ``reserve`` tokens
        of the step for those that generate.
        """
        if draft.prefills < 1:
            return 0
        wanted = len(request.tokens) - request.num_computed
        count = self.limits.chunk(wanted, draft.room - reserve)
        if count:
            draft.prefills -= 1
        return count

    def _make_room(self, request: Request, num_tokens: int) -> tuple[int, ...] | None:
        """Cover ``num_tokens`` of a running request, preempting from the last; None if it lost its
        own blocks.
        """
        while (added := self.blocks.cover(request, num_tokens)) is None:
            if self.roster.preempt_last() is request:
                return None
        return added

    # Requests that wait.

    def _admit(self, draft: StepDraft) -> None:
        waiting = self.roster.waiting
        held_back: list[Request] = []
        while self._may_admit(draft) and len(held_back) < self.limits.max_num_seqs:
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
                extra=source.extra,
            )
        )

    # Results.

    def commit(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineOutput]:
        """Take in the result of the step in flight; return one output for each request that has
        new tokens or ends. A result that contradicts the plan for one request, or has no
        numbers for it, ends that one alone.

        Raises MessageError, changing nothing, if it is not a result of this step at all.
        """
        self._check_result(plan, output)
        now = self.clock()
        in_step, self._in_step = self._in_step, {}
        results: list[EngineOutput] = []
        ended = False
        for req_id, tokens in zip(output.req_ids, output.tokens, strict=True):
            request = in_step.pop(req_id)
            if request.phase is Phase.RUNNING:
                result = self._advance(request, plan.num_tokens[req_id], tokens, output, now)
                if result is not None:
                    results.append(result)
                    ended = ended or result.finish_reason is not None
        results += self._end_running(
            in_step.values(), MessageError(f"step {plan.step_id} gave no result for this request")
        )
        if ended or in_step:
            self.roster.sweep()
        return results

    def _check_result(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        named = set(output.req_ids)
        if output.step_id != plan.step_id:
            what = f"it says step {output.step_id}"
        elif len(output.req_ids) != len(output.tokens) or len(named) != len(output.req_ids):
            what = f"{len(output.req_ids)} ids ({len(named)} different), {len(output.tokens)} rows"
        elif not named <= self._in_step.keys():
            what = f"it names {sorted(named - self._in_step.keys())}, which the step did not have"
        else:
            return
        raise MessageError(f"the result of step {plan.step_id} is not one: {what}")

    def _advance(
        self,
        request: Request,
        count: int,
        new: tuple[int, ...],
        output: ModelRunnerOutput,
        now: float,
    ) -> EngineOutput | None:
        """Take in one request's part of a result."""
        if output.nan_counts and (bad := output.nan_counts.get(request.req_id)):
            return self._no_numbers(request, bad)
        tokens = request.tokens
        computed = request.num_computed + count
        if computed < len(tokens):
            if new:
                return self._fault(request, f"{len(new)} tokens before its prompt was computed")
            self._note_computed(request, computed)
            return None
        if not new:
            return self._fault(request, "no token though all of its own were computed")
        if request.first_token is None:
            request.first_token = now
        stop: Stop | None = None
        rule = request.rule
        taken = 0
        for token in new:
            tokens.append(token)
            taken += 1
            if token in rule.stop_ids or len(tokens) >= rule.max_total:
                stop = rule.judge(token, len(tokens) - request.num_prompt, len(tokens))
                if stop is not None:
                    break
        self._note_computed(request, len(tokens) - 1)
        return self._result(request, new if taken == len(new) else new[:taken], output, stop)

    def _note_computed(self, request: Request, computed: int) -> None:
        request.num_computed = computed
        if computed >= (request.num_named + 1) * self.blocks.block_size:
            self.blocks.name_full(request)

    def _result(
        self, request: Request, new: tuple[int, ...], output: ModelRunnerOutput, stop: Stop | None
    ) -> EngineOutput:
        req_id = request.source.req_id
        logprobs = output.logprobs.get(req_id) if output.logprobs else None
        prompt_logprobs = None
        if output.prompt_logprobs and request.num_output == len(new):
            prompt_logprobs = output.prompt_logprobs.get(req_id)
        if stop is None:
            return EngineOutput(
                req_id=req_id, new_tokens=new, logprobs=logprobs, prompt_logprobs=prompt_logprobs
            )
        return self.roster.finish(
            request,
            stop.reason,
            new_tokens=new,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            stop_reason=stop.token,
        )

    def fail(self, plan: SchedulerOutput, error: BaseException) -> list[EngineOutput]:
        """End the requests of the step in flight with its error. What the workers should have
        learnt from ``plan`` about ended requests is said again with the next one.
        """
        in_step, self._in_step = self._in_step, {}
        self.roster.say_again(plan)
        results = self._end_running(in_step.values(), error)
        self.roster.sweep()
        return results

    def _end_running(self, requests: Iterable[Request], error: BaseException) -> list[EngineOutput]:
        return [
            self.roster.finish(request, "error", error=error)
            for request in requests
            if request.phase is Phase.RUNNING
        ]

    def _no_numbers(self, request: Request, count: int) -> EngineOutput:
        error = NoNumbersError(
            f"the model gave no numbers for request {request.req_id} ({count} are NaN or "
            "infinite): its weights or its cache are corrupt; reload the weights, or start a new "
            "engine"
        )
        self.blocks.clear_cache()  # else the next request of this beginning finds the same cells
        return self.roster.finish(request, "error", error=error)

    def _fault(self, request: Request, what: str) -> EngineOutput:
        error = MessageError(f"the step gave request {request.req_id} {what}")
        return self.roster.finish(request, "error", error=error)
