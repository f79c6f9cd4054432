"""Steps whose forward is done and whose tokens are not chosen yet."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from attrs import frozen
from hardpoint.errors import LifecycleError
from hardpoint.messages import ModelRunnerOutput, StepTimings

if TYPE_CHECKING:
    import torch
    from hardpoint.messages import GraphStats, Logprobs, SchedulerOutput, StepTicket

    from hardpoint_runtime.batch.inputs import BatchInputs
    from hardpoint_runtime.pooling import Pooled
    from hardpoint_runtime.sampling.sampler import Sampled

NOTHING: Mapping[str, Logprobs] = MappingProxyType({})


@frozen(kw_only=True, eq=False)
class WaitingStep:
    """One step between its two phases, with the seconds that the first took."""

    step_id: int
    generation: int
    inputs: BatchInputs | None
    logits: torch.Tensor | None
    pooled: Pooled
    graph_stats: GraphStats | None
    prepare: float
    forward: float

    def output(
        self,
        sampled: Sampled | None,
        prompt_logprobs: Mapping[str, Logprobs] = NOTHING,
        *,
        sample: float,
    ) -> ModelRunnerOutput:
        """Return the step's result with the tokens of its sampled rows, chosen in ``sample``
        seconds; None: there are none. Rows that are not sampled have an empty tuple.
        """
        req_ids = () if self.inputs is None else self.inputs.req_ids
        ids = () if self.inputs is None or sampled is None else self.inputs.sampled_ids
        tokens = () if sampled is None else sampled.tokens
        chosen = dict(zip(ids, tokens, strict=True))
        logprobs = {} if sampled is None else sampled.logprobs
        nan_counts = {} if sampled is None else sampled.nan_counts
        return ModelRunnerOutput(
            step_id=self.step_id,
            generation=self.generation,
            req_ids=req_ids,
            tokens=tuple((chosen[req_id],) if req_id in chosen else () for req_id in req_ids),
            logprobs={ids[row]: found for row, found in logprobs.items()},
            prompt_logprobs=prompt_logprobs,
            pooled=self.pooled.vectors,
            nan_counts={
                **{ids[row]: count for row, count in nan_counts.items()},
                **self.pooled.nan_counts,
            },
            timings=StepTimings(prepare=self.prepare, forward=self.forward, sample=sample),
            graph_stats=self.graph_stats,
        )


class WaitingSteps:
    """The steps that wait for ``sample_tokens``. Owned by the model runner."""

    def __init__(self) -> None:
        self._steps: dict[int, WaitingStep] = {}

    def keep(self, step: WaitingStep) -> None:
        """Let a step wait."""
        self._steps[step.step_id] = step

    def take(self, ticket: StepTicket) -> WaitingStep:
        """Return the step of ``ticket``; it waits no longer. Raises LifecycleError if it is none
        that waits.
        """
        step = self._steps.get(ticket.step_id)
        if step is None or step.generation != ticket.generation:
            waiting = ", ".join(f"step {number}" for number in self._steps) or "none"
            raise LifecycleError(
                f"sample_tokens: step {ticket.step_id} does not wait for sampling (waiting: "
                f"{waiting})"
            )
        del self._steps[ticket.step_id]
        return step

    def abandon(self, plan: SchedulerOutput, *, most: int) -> None:
        """Forget the steps that all requests have left by ``plan``; of the others up to ``most``
        may wait, each for requests of its own. Raises LifecycleError.
        """
        for step in tuple(self._steps.values()):
            alive = set(step.inputs.req_ids if step.inputs else ()) - plan.finished
            if not alive:
                del self._steps[step.step_id]
            elif len(self._steps) >= most or alive & set(plan.num_tokens):
                raise LifecycleError(
                    f"step {step.step_id} waits for sample_tokens (requests {sorted(alive)}); step "
                    f"{plan.step_id} cannot run before it"
                )

    def clear(self) -> None:
        """Forget all."""
        self._steps.clear()
