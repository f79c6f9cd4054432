"""Choosing the best token natively where a step's rows want nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint_runtime.sampling.sampler import NO_CHOICE, Sampled, Sampler
from torch import float32

if TYPE_CHECKING:
    from hardpoint_runtime.sampling.batch import SamplingBatch
    from torch import Tensor

    from hardpoint_cpu.model_runner import CpuModelRunner


class ProgramSampler(Sampler):
    """The given sampler, but for batches of greedy rows whose logits the runner's program made."""

    def __init__(self, runner: CpuModelRunner, other: Sampler) -> None:
        vars(self).update(vars(other))
        self._runner = runner

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """See :class:`Sampler`."""
        program = self._runner.program
        wants_more = batch.edits_logits or batch.draws is not None or batch.logprobs
        readable = logits.dtype == float32 and logits.is_contiguous()
        if wants_more or program is None or not readable:
            return super().sample(logits, batch)
        best = program.best(logits)
        return Sampled(
            tokens=tuple(NO_CHOICE if token < 0 else token for token in best),
            nan_counts={
                row: self.count_unusable(logits[row]) for row, token in enumerate(best) if token < 0
            },
        )
