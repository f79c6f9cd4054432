"""Steps by one program: a device that lowers the whole model has one graph, for any batch.

There is nothing to pad and no static buffer: a replay reads the step's inputs themselves. What the
program does not give (vectors, scores of prompts, what a hook on a module changes) the step gets
from torch, and the log says so once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from hardpoint.errors import UnsupportedError

from hardpoint_runtime.graphs.captured import CaptureReport
from hardpoint_runtime.graphs.dispatcher import Dispatch, Dispatcher
from hardpoint_runtime.graphs.errors import GraphBufferError
from hardpoint_runtime.graphs.identity import Identities
from hardpoint_runtime.graphs.modes import GraphMode
from hardpoint_runtime.graphs.statistics import GraphCounts

if TYPE_CHECKING:
    from hardpoint.messages import GraphStats, SchedulerOutput
    from torch import Tensor, nn

    from hardpoint_runtime.batch.inputs import BatchInputs
    from hardpoint_runtime.forward_context import ForwardContext
    from hardpoint_runtime.graphs.plan import GraphPlan
    from hardpoint_runtime.model_runner import TorchModelRunner
    from hardpoint_runtime.models.language_model import Carried

_logger = logging.getLogger("hardpoint.graphs")


class StepProgram(ABC):
    """What ``DeviceOps.lower`` returns: a model as a program over its weights and KV cache, where
    they are. Used on the worker's thread alone.
    """

    most_tokens: int
    """The longest step that it runs."""
    positions: int
    """How many positions it knows."""
    holds_addresses: bool = True
    """Whether it reads weights where they were when it was made; else they may be exchanged."""

    @abstractmethod
    def run(self, inputs: BatchInputs, carried: Carried | None = None) -> Tensor | Carried | None:
        """Run a step: write its keys and values to the cache; return the logits float32 [m, V] of
        its ``logits_rows``, valid until the next run, None for no such row. A pipeline stage takes
        what the one before ``carried``, and returns what the next one takes.

        Raises CancelledStepError once the driver has ended the step.
        """

    @abstractmethod
    def close(self) -> None:
        """Give its threads and memory back. It is not run again."""


class ProgramGraphs:
    """The program of one runner, in place of :class:`~hardpoint_runtime.graphs.steps.StepGraphs`.
    Built by ``TorchModelRunner.make_graphs``, used on the worker's thread.
    """

    longest = sys.maxsize
    """Tokens of a request: a program is made anew for longer ones."""

    def __init__(self, runner: TorchModelRunner, plan: GraphPlan) -> None:
        self.plan = plan
        self.dispatcher = Dispatcher(plan)
        self.counts = GraphCounts(plan)
        self.program: StepProgram | None = None
        self._runner = runner
        self._identities: Identities | None = None
        self._hooks: tuple[Any, ...] = ()
        self._told: set[str] = set()
        self._ran = False
        self._looked_at: int | None = None

    def capture_all(self) -> CaptureReport:
        """Lower the model. Called by the runner's warm-up, and again where what was lowered is no
        longer what there is. Raises GraphCaptureError for a model that cannot be.
        """
        started = time.perf_counter()
        self._drop()
        runner, model = self._runner, self._runner.get_model()
        self.program = runner.device.lower(runner)
        self._hooks = hooks_of(model)
        if self.program.holds_addresses:
            self._identities = Identities(
                {
                    f"weight {prefix}.{name}": functools.partial(
                        module._parameters.__getitem__,  # noqa: SLF001 - live, and quick
                        name,
                    )
                    for prefix, module in model.named_modules()
                    for name, held in module._parameters.items()  # noqa: SLF001
                    if held is not None
                },
                model,
            )
        return CaptureReport(graphs=1, seconds=time.perf_counter() - started)

    def dispatch(self, num_tokens: int, num_reqs: int, max_query: int) -> Dispatch:
        """Return how a batch runs."""
        return self.dispatcher.dispatch(num_tokens, num_reqs, max_query)

    def find(self, dispatch: Dispatch | None) -> None:
        """Nothing stands for the model: :meth:`serving` is asked for the whole step."""

    def serving(self, inputs: BatchInputs) -> StepProgram | None:
        """Return the program for a step, None where it runs through torch."""
        self._ran = False
        trusted = self._is_as_it_was()
        if inputs.dispatch is None or inputs.dispatch.mode is GraphMode.NONE:
            return None
        if reason := self._reason_against(inputs, trusted=trusted):
            if self._runner.config.model.batch_invariant:
                raise UnsupportedError(
                    "batch_invariant", "a step beside the program", reason=reason
                )
            self.tell(f"some steps, where {reason}", loud=self._runner.seat.is_first_stage)
            return None
        program = self.program if trusted else self._current()
        self._looked_at = self._runner.other_calls
        self._ran = True
        return program

    def _is_as_it_was(self) -> bool:
        """Whether only steps came since the model was looked over: what it is made of, where its
        weights are, and whether hooks are on it.
        """
        calls = self._runner.other_calls
        return calls is not None and calls == self._looked_at

    def run(
        self, program: StepProgram, inputs: BatchInputs, plan: SchedulerOutput
    ) -> Tensor | None:
        """Replay a step; return its logits, None where there are none or another stage has them."""
        runner = self._runner
        timing = runner.timing and runner.timing.measured(len(inputs.row_of_token))
        logits: Any
        with timing or contextlib.nullcontext():
            if runner.line is None:
                logits = program.run(inputs)
            else:
                stage: Any = StageProgram(program, inputs, runner.get_model().carried_shapes)
                step = runner.make_forward_context(inputs, None, plan)
                tokens = torch.from_numpy(inputs.positions)
                logits = runner.line.run(stage, tokens, tokens, step, None)
        # Those of a step that waits for its sampling must outlive the next step's.
        return logits.clone() if plan.defer_sampling and logits is not None else logits

    def count(self, inputs: BatchInputs) -> GraphStats | None:
        """Count a step; return what its output says of it."""
        dispatch = inputs.dispatch
        if dispatch is None:
            return None
        if not self._ran:
            dispatch = Dispatch(mode=GraphMode.NONE, key=dispatch.key)
        return self.counts.step(dispatch, len(inputs.row_of_token))

    def tell(self, reason: str, *, loud: bool = True) -> None:
        """Log once what runs through torch; ``loud``: other stages do not warn of the same. Nor do
        shards but the first.
        """
        if reason not in self._told:
            self._told.add(reason)
            loud = loud and self._runner.seat.place.tensor == 0
            level = logging.WARNING if loud else logging.INFO
            _logger.log(level, "through torch instead of the program, and slower: %s", reason)

    def close(self) -> None:
        """Give the program's threads and memory back."""
        self._drop()

    def _current(self) -> StepProgram | None:
        """Return the program over what there is now."""
        runner, program = self._runner, self.program
        if program is not None and runner.max_model_len > program.positions:
            self.capture_all()
        elif self._identities is not None:
            try:
                self._identities.check(runner.get_model())
            except GraphBufferError as error:
                _logger.info("the program is made anew: %s", error)
                self.capture_all()
        return self.program

    def _reason_against(self, inputs: BatchInputs, *, trusted: bool) -> str | None:
        """Return what of a step the program does not give, None if it does it all."""
        runner = self._runner
        if not trusted and any(self._hooks):
            return "a module of the model has a hook"
        if runner.requests is None:
            return None
        if runner.prompt_logprobs.rows(runner.requests, inputs):
            return "scores of prompts are asked for"
        if runner.pooling.rows(runner.requests, inputs):
            return "vectors are asked for"
        return None

    def _drop(self) -> None:
        if self.program is not None:
            self.program.close()
        self.program = self._identities = None


@frozen(eq=False)
class StageProgram:
    """Stands for the model of a pipeline stage in one step, and runs its program instead."""

    program: StepProgram
    inputs: BatchInputs
    carried_shapes: Callable[[int], Mapping[str, tuple[int, ...]]]

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        step: ForwardContext,
        rows: Tensor | None = None,
        carried: Carried | None = None,
    ) -> Tensor | Carried | None:
        """Return what the next stage takes; on the last one the logits, None for no rows."""
        return self.program.run(self.inputs, carried)


def hooks_of(model: nn.Module) -> tuple[Any, ...]:
    """Return the dictionaries in which hooks on the calls of modules are kept; any that is not
    empty changes what the model computes.
    """
    names = ("_forward_hooks", "_forward_pre_hooks")
    return tuple(getattr(module, name) for module in model.modules() for name in names)
