"""Choosing tokens natively: the best, and draws from what min-p, top-k and top-p leave.

The rule is the built-in sampler's, and so are the tokens: where rounding could change one, that row
is drawn by the built-in sampler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import evolve
from hardpoint_runtime.graphs.programs import ProgramGraphs
from hardpoint_runtime.sampling.sampler import NO_CHOICE, Sampled, Sampler

from hardpoint_cpu.native.library import Wish
from hardpoint_cpu.native.scores import gathered
from hardpoint_cpu.native.sparse_edits import are_sparse, edited

if TYPE_CHECKING:
    from hardpoint_runtime.sampling.batch import Draws, SamplingBatch
    from torch import Tensor

    from hardpoint_cpu.model_runner import CpuModelRunner
    from hardpoint_cpu.native.program import Program

MOST_UNSIGNED = (1 << 64) - 1


class ProgramSampler(Sampler):
    """The given sampler, whose choices the runner's program makes where it has one."""

    def __init__(self, runner: CpuModelRunner, other: Sampler) -> None:
        vars(self).update(vars(other))
        self._runner = runner

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """See :class:`Sampler`."""
        program = self._runner.program
        if program is not None and program.best is not None:
            best = program.best.tolist()
            wants_more = batch.edits_logits or batch.draws is not None or batch.logprobs
            if not wants_more and min(best) >= 0:
                return Sampled(tokens=tuple(best))
            program.finish()
        if program is None or not len(logits):
            return super().sample(logits, batch)
        reasons = dict(self._reasons_against(batch))
        for reason in reasons:
            self._tell(f"choosing tokens, where {reason}")
        if not all(reasons.values()):
            return super().sample(logits, batch)
        with self._edited(logits, batch) as changed:
            found = self._chosen(program, changed, batch.draws)
            nan_counts = {
                row: self.count_unusable(changed[row])
                for row, token in enumerate(found)
                if token < 0
            }
        tokens = tuple(NO_CHOICE if token < 0 else token for token in found)
        raw = _plain(logits)
        logprobs = gathered(raw, tokens, batch.logprobs, normalised=self.logprobs_mode.normalised)
        return Sampled(tokens=tokens, logprobs=logprobs, nan_counts=nan_counts)

    def _reasons_against(self, batch: SamplingBatch) -> Iterator[tuple[str, bool]]:
        """Yield what of a batch goes through torch, and whether only the change of logits does."""
        processors = batch.processors
        if processors is not None and (processors.changing or processors.refining):
            yield "logits processors are applied", not processors.refining
        if batch.grammar:
            yield "a grammar is followed", True
        if batch.allowed is not None:
            yield "only some tokens are allowed", True
        if self.logprobs_mode.processed and batch.logprobs:
            yield "log-probabilities of changed logits are wanted", False

    def _tell(self, reason: str) -> None:
        if isinstance(graphs := self._runner.graphs, ProgramGraphs):
            graphs.tell(reason)

    def _edited(
        self, logits: Tensor, batch: SamplingBatch
    ) -> contextlib.AbstractContextManager[Tensor]:
        """Lend the logits as they are chosen from, float32 in one piece."""
        if not batch.edits_logits:
            return contextlib.nullcontext(_plain(logits))
        if are_sparse(logits, batch):
            return edited(logits, batch)
        return contextlib.nullcontext(self.edit(logits, batch))

    def _chosen(self, program: Program, logits: Tensor, draws: Draws | None) -> list[int]:
        """Return the token of each row; -1 where there is nothing to choose from."""
        tokens = program.choose(logits, _wishes(len(logits), draws))
        undecided = {row for row, token in enumerate(tokens) if token < -1}
        if undecided and draws is not None:
            places = [place for place, row in enumerate(draws.rows.tolist()) if row in undecided]
            those = _some(draws, np.asarray(places))
            rows = torch.from_numpy(those.rows)
            drawn = self.draw(self.scale(logits, rows, those), those).tolist()
            for row, token in zip(those.rows.tolist(), drawn, strict=True):
                tokens[row] = token
        return tokens


def _plain(logits: Tensor) -> Tensor:
    """Return logits as float32 in one piece: as they are, if they are so."""
    if logits.dtype is torch.float32 and logits.is_contiguous():
        return logits
    return logits.to(torch.float32).contiguous()


def _wishes(rows: int, draws: Draws | None) -> Any:
    """Return what each row wants, as the library takes it."""
    wishes = (Wish * rows)()
    if draws is None:
        return wishes
    count = len(draws.rows)
    columns = zip(
        draws.rows.tolist(),
        draws.temperature.tolist(),
        draws.keys.tolist(),
        [0.0] * count if draws.min_p is None else draws.min_p.tolist(),
        [1.0] * count if draws.top_p is None else draws.top_p.tolist(),
        [0] * count if draws.top_k is None else draws.top_k.tolist(),
        strict=True,
    )
    for row, temperature, key, min_p, top_p, top_k in columns:
        wishes[row] = Wish(temperature, min_p, top_p, top_k, key & MOST_UNSIGNED)
    return wishes


def _some(draws: Draws, places: np.ndarray) -> Draws:
    """Return the draws at ``places``."""
    names = ("rows", "temperature", "keys", "min_p", "top_k", "top_p")
    given = {name: getattr(draws, name) for name in names}
    return evolve(
        draws, **{name: None if each is None else each[places] for name, each in given.items()}
    )
