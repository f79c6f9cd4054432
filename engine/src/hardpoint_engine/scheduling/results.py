"""What becomes of a step's result: new tokens, ended requests, named blocks.

Pure, as the scheduler is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from attrs import evolve
from hardpoint.errors import HardpointError, InvalidRequestError
from hardpoint.messages import MessageError, ModelRunnerOutput, SchedulerOutput

from hardpoint_engine.request import EngineOutput, Phase, Request
from hardpoint_engine.scheduling.kv_blocks import KVBlocks
from hardpoint_engine.scheduling.roster import Roster
from hardpoint_engine.scheduling.stopping import END_OF_TEXT, Stop
from hardpoint_engine.structured.grammar import GrammarError
from hardpoint_engine.structured.structured_requests import take_tokens


class NoNumbersError(HardpointError):
    """The model gave NaN or infinity for a request's next token.

    What to do: send it again in ``dtype = "float32"``; if it stays, the weights or the platform's
    kernels are at fault.
    """


class Results:
    """Takes in the results of the steps in flight, for the scheduler, in the order of the plans."""

    def __init__(
        self,
        roster: Roster,
        blocks: KVBlocks,
        clock: Callable[[], float],
        processors: tuple[str, ...],
    ) -> None:
        self.processors = processors
        self.roster = roster
        self.blocks = blocks
        self.clock = clock

    def commit(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineOutput]:
        """See :meth:`Scheduler.commit`."""
        in_step = self.roster.in_flight.get(plan.step_id, {})
        _check_result(plan, output, in_step)
        self.roster.in_flight.pop(plan.step_id, None)
        now = self.clock()
        results: list[EngineOutput] = []
        ended = False
        for req_id, tokens in zip(output.req_ids, output.tokens, strict=True):
            request = in_step.pop(req_id)
            if request.phase is Phase.RUNNING:
                result = self._advance(request, plan.num_tokens[req_id], tokens, output, now)
                if result is not None:
                    results.append(result)
                    ended = ended or result.finish_reason is not None
            else:
                self.blocks.release(request)
        if in_step:
            missing = MessageError(f"step {plan.step_id} gave no result for this request")
            results += self._end(in_step.values(), missing)
        if ended or in_step:
            self.roster.sweep()
        return results

    def fail(self, plan: SchedulerOutput, error: BaseException) -> list[EngineOutput]:
        """See :meth:`Scheduler.fail`."""
        in_step = self.roster.in_flight.pop(plan.step_id, {})
        self.roster.say_again(plan)
        results = self._end(in_step.values(), error)
        self.roster.sweep()
        return results

    def _end(self, requests: Iterable[Request], error: BaseException) -> list[EngineOutput]:
        """End those that still run; those that ended while the step had them give their blocks."""
        results = []
        for request in requests:
            if request.phase is Phase.RUNNING:
                results.append(self.roster.finish(request, "error", error=error))
            else:
                self.blocks.release(request)
        return results

    def _advance(
        self,
        request: Request,
        count: int,
        new: tuple[int, ...],
        output: ModelRunnerOutput,
        now: float,
    ) -> EngineOutput | None:
        """Take in one request's part of a result."""
        if output.nan_counts and (bad := output.nan_counts.get(request.req_id)) is not None:
            return self._no_numbers(request, bad)
        tokens = request.tokens
        computed = request.num_computed + count
        if computed < len(tokens):
            if new:
                return self._fault(request, f"{len(new)} tokens before its prompt was computed")
            self._note_computed(request, computed)
            return None
        if request.source.pooling is not None and not new:
            return self._pooled(request, output)
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
        if stop is None and request.grammar is not None:
            return self._follow_grammar(request, new, output)
        return self._result(request, new if taken == len(new) else new[:taken], output, stop)

    def _follow_grammar(
        self, request: Request, new: tuple[int, ...], output: ModelRunnerOutput
    ) -> EngineOutput:
        try:
            complete = take_tokens(request, new)
        except GrammarError as error:
            return self.roster.finish(request, "error", error=error)
        result = self._result(request, new, output, END_OF_TEXT if complete else None)
        return evolve(result, ends_in_text=complete)

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

    def _pooled(self, request: Request, output: ModelRunnerOutput) -> EngineOutput:
        """End a request that asked for a vector."""
        vector = output.pooled.get(request.req_id)
        if vector is None:
            return self._fault(request, "no vector though all of its tokens were computed")
        self._note_computed(request, len(request.tokens))
        return evolve(self.roster.finish(request, "stop"), pooled=vector)

    def _no_numbers(self, request: Request, wrong: int) -> EngineOutput:
        """End a request with ``wrong`` logits that are no numbers; 0: all are -inf, which is what
        forbidden tokens are. Only numbers that the model gave throw a doubt on the cache.
        """
        changes = [f"logits processor {name}" for name in self.processors]
        forbidding = [*_forbidding(request), *changes]
        if forbidding and not wrong:
            left = InvalidRequestError(
                f"request {request.req_id}: after {request.num_output} tokens, what forbids tokens "
                f"({', '.join(forbidding)}) leaves none to choose"
            )
            return self.roster.finish(request, "error", error=left)
        what = f"{wrong} are NaN or infinite" if wrong else "all are -infinite"
        blamed = " or ".join(["its weights or its cache are corrupt", *changes])
        error = NoNumbersError(
            f"the model gave no numbers for request {request.req_id} ({what}): {blamed}; reload "
            "the weights, or start a new engine"
        )
        self.blocks.clear_cache()  # else the next request of this beginning finds the same cells
        return self.roster.finish(request, "error", error=error)

    def _fault(self, request: Request, what: str) -> EngineOutput:
        error = MessageError(f"the step gave request {request.req_id} {what}")
        return self.roster.finish(request, "error", error=error)


def _forbidding(request: Request) -> list[str]:
    """Return the parameters by which a request forbids tokens."""
    names = ("allowed_token_ids", "bad_word_ids", "min_tokens", "structured_outputs", "extra_args")
    return [name for name in names if getattr(request.source.sampling, name)]


def _check_result(
    plan: SchedulerOutput, output: ModelRunnerOutput, in_step: Mapping[str, Request]
) -> None:
    named = set(output.req_ids)
    if output.step_id != plan.step_id:
        what = f"it says step {output.step_id}"
    elif len(output.req_ids) != len(output.tokens) or len(named) != len(output.req_ids):
        what = f"{len(output.req_ids)} ids ({len(named)} different), {len(output.tokens)} rows"
    elif not named <= in_step.keys():
        what = f"it names {sorted(named - in_step.keys())}, which the step did not have"
    else:
        return
    raise MessageError(f"the result of step {plan.step_id} is not one: {what}")
