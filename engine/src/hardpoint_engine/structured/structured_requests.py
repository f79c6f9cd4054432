"""The structured requests of one engine: those whose grammar is still compiled, and the masks of
those that run. Used by the engine core, under its lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
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
    """Lets requests wait for their grammar, and says what may come next in their answers."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._preparing: list[Request] = []
        self._begun: dict[str, Request] = {}

    def __len__(self) -> int:
        """How many wait for their grammar."""
        return len(self._preparing)

    def add(self, request: Request) -> None:
        """Let a request whose grammar is being compiled wait for it, in phase PREPARING."""
        self._preparing.append(request)

    def settle(self) -> None:
        """Let those whose grammar is there wait for their turn; end those that cannot have it."""
        for request in self._preparing:
            grammar = request.source.grammar
            if request.phase is not Phase.PREPARING or grammar is None or not grammar.done():
                continue
            error = grammar.exception()
            if error is None:
                request.grammar = grammar.result().start()
                self._begun[request.req_id] = request
                self._roster.prepared(request)
            else:
                self._roster.end(request.req_id, "error", error=_typed(error))
        self._preparing = [each for each in self._preparing if each.phase is Phase.PREPARING]

    def due(self, plan: SchedulerOutput) -> dict[str, Request]:
        """Return those of a step's requests for whose next token a mask is needed: structured, and
        with their last known token in the step. Costs nothing where there are none.
        """
        due = {}
        for req_id, request in list(self._begun.items()):
            count = plan.num_tokens.get(req_id)
            if request.phase is Phase.FINISHED:
                del self._begun[req_id]
            elif count is not None and request.num_computed + count >= len(request.tokens):
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
