"""The structured requests of one engine: those whose grammar is still compiled, and the masks of
those that run. Used by the engine core, under its lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, wait
from typing import TYPE_CHECKING

from hardpoint.errors import HardpointError, InvalidRequestError
from hardpoint.messages import GrammarOutput, ModelRunnerOutput, SchedulerOutput, StepTicket

from hardpoint_engine.request import Phase, Request
from hardpoint_engine.structured.grammar import GrammarError

if TYPE_CHECKING:
    from hardpoint_engine.scheduling.roster import Roster


class DeferredStep:
    """The result of a step in two phases: the forward, then the choice of tokens. Both were sent;
    if the first failed, its error is the step's.
    """

    def __init__(
        self,
        first: Future[ModelRunnerOutput | StepTicket],
        second: Future[ModelRunnerOutput],
    ) -> None:
        self._first = first
        self._second = second

    def result(self) -> ModelRunnerOutput:
        """Wait for the result."""
        self._first.result()
        return self._second.result()


class StructuredRequests:
    """Lets requests wait for their grammar, and says what may come next in their answers.

    Keeps none of those that wait for their turn, run or have ended: a step's work grows with the
    requests in it, and with those whose grammar has become ready since the step before.

    ``at_once``: each grammar is waited for when its request comes, where it must not depend on time
    with which step a request begins.
    """

    def __init__(self, roster: Roster, *, at_once: bool = False) -> None:
        self._roster = roster
        self._at_once = at_once
        self._preparing = 0
        self._ready: deque[Request] = deque()
        self._used = False

    def __len__(self) -> int:
        """How many wait for their grammar, counted until it is there also if they have ended."""
        return self._preparing

    def add(self, request: Request) -> None:
        """Let a request whose grammar is being compiled wait for it, in phase PREPARING."""
        self._used = True
        self._preparing += 1
        if request.source.grammar is not None:
            if self._at_once:
                wait([request.source.grammar])
            # On the thread that compiles, or at once.
            request.source.grammar.add_done_callback(lambda _: self._ready.append(request))

    def settle(self) -> None:
        """Let those whose grammar is there wait for their turn; end those that cannot have it."""
        while self._ready:
            request = self._ready.popleft()
            self._preparing -= 1
            grammar = request.source.grammar
            if request.phase is not Phase.PREPARING or grammar is None:
                continue
            error = CancelledError() if grammar.cancelled() else grammar.exception()
            if error is None:
                self._roster.prepared(request)
            else:
                self._roster.end(request.req_id, "error", error=_typed(error))

    def due(self, plan: SchedulerOutput) -> dict[str, Request]:
        """Return those of a step's requests for whose next token a mask is needed: structured, and
        with their last known token in the step. Their answers begin here. Costs nothing before the
        first structured request.
        """
        if not self._used:
            return {}
        due = {}
        for req_id, request in self._roster.in_flight.get(plan.step_id, {}).items():
            grammar = request.source.grammar
            if grammar is None:
                continue
            if request.num_computed + plan.num_tokens[req_id] >= len(request.tokens):
                if request.grammar is None:
                    request.grammar = grammar.result().start()
                due[req_id] = request
        return due

    @staticmethod
    def masks(due: Mapping[str, Request]) -> GrammarOutput:
        """Return the masks of a step. A grammar that fails is noted with its request, and lets
        everything come: the request ends when the step has landed.
        """
        ids, masks = [], []
        for req_id, request in due.items():
            if request.grammar is None:
                continue
            try:
                mask = request.grammar.mask()
            except GrammarError as error:
                request.grammar_error = error
                continue
            ids.append(req_id)
            masks.append((mask,))
        return GrammarOutput(req_ids=tuple(ids), masks=tuple(masks))


def take_tokens(request: Request, tokens: tuple[int, ...]) -> bool:
    """Take in the tokens of a structured request; return whether its answer is complete. Raises
    GrammarError.
    """
    if request.grammar_error is not None:
        raise request.grammar_error
    if request.grammar is None:
        return False
    request.grammar.accept(tokens)
    return request.grammar.complete


def send_later(
    first: Future[ModelRunnerOutput | StepTicket],
    send: Callable[[], Future[ModelRunnerOutput]],
) -> DeferredStep:
    """Send the second phase of a step, whose first is on its way, and return the step's result to
    be. What cannot be sent is a failed step.
    """
    try:
        second = send()
    except Exception as error:  # noqa: BLE001 - raised where the step's result is awaited
        second = Future()
        second.set_exception(error)
    return DeferredStep(first, second)


def _typed(error: BaseException) -> HardpointError:
    if isinstance(error, HardpointError):
        return error
    made = InvalidRequestError(
        f"structured_outputs: the grammar could not be compiled: {type(error).__name__}: {error}",
        field="structured_outputs",
    )
    made.__cause__ = error
    return made
