"""The sampler: logits [n, V] in, one token for each row out. Stages in the documented order.

Order: (raw logits kept for log-probabilities) float32, grammar, allowed ids, bad words and minimum
length, bias, processors that may change the best token, penalties, greedy choice; for rows that
draw: temperature, min-p, processors that do not, top-k, top-p (processed logits are those that are
left here), draw.

A row whose best logit after the edits is not a finite number, because one of its logits is NaN or
+inf or because all are -inf, gets NO_CHOICE and is counted; no other row notices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from hardpoint_runtime.operations import Operations
from hardpoint_runtime.sampling import edits, filters
from hardpoint_runtime.sampling.logprobs import LogprobsMode, gather_logprobs

if TYPE_CHECKING:
    from hardpoint.messages import Logprobs

    from hardpoint_runtime.device import DeviceOps
    from hardpoint_runtime.sampling.batch import Draws, SamplingBatch
    from hardpoint_runtime.sampling.processors import AppliedProcessors

NO_CHOICE = 0
"""The token of a row that has nothing to choose from."""


@frozen(kw_only=True)
class Sampled:
    """The tokens of n rows, the log-probabilities of those rows that asked, and ``nan_counts``: row
    -> how many of its logits were NaN or +inf; 0 for a row where all were -inf.
    """

    tokens: tuple[int, ...]
    logprobs: Mapping[int, Logprobs] = field(factory=dict)
    nan_counts: Mapping[int, int] = field(factory=dict)


class Sampler:
    """Chooses tokens on one device. Built by ``TorchModelRunner.make_sampler``, stateless.

    What looks at whole rows of logits is done by ``operations``; None: in plain torch.
    """

    def __init__(
        self,
        device: DeviceOps,
        logprobs_mode: LogprobsMode | None = None,
        operations: Operations | None = None,
    ) -> None:
        self.device = device
        self.operations = operations or Operations()
        self.logprobs_mode = logprobs_mode or LogprobsMode()

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """Choose a token for each of the n rows of ``logits`` [n, V], any floating dtype.

        The logits are not changed. A batch of greedy rows takes one argmax; ties go to the lowest
        id.
        """
        edited = self.edit(logits, batch) if batch.edits_logits else logits
        chosen = edited.argmax(-1)
        # argmax takes a NaN for the greatest, so that the value there tells of the whole row.
        usable = edited.gather(1, chosen[:, None])[:, 0].isfinite()
        scored = edited if self.logprobs_mode.processed else logits
        if batch.draws is not None:
            rows = self.device.to_device(batch.draws.rows, torch.int64)
            scaled = self.scale(edited, rows, batch.draws, batch.processors)
            if self.logprobs_mode.processed and batch.logprobs:
                scored = self.processed(edited, scaled, batch)
            chosen = chosen.index_copy(0, rows, self.draw(scaled, batch.draws))
        chosen = torch.where(usable, chosen, NO_CHOICE)
        logprobs: dict[int, Logprobs] = {}
        if batch.logprobs:
            found = gather_logprobs(
                scored,
                chosen,
                batch.logprobs,
                self.device.to_host,
                normalised=self.logprobs_mode.normalised,
            )
            logprobs = {ask.row: row for ask, row in zip(batch.logprobs, found, strict=True)}
        # One transfer for both: a row without a choice comes as -1.
        tokens = self.device.to_host(torch.where(usable, chosen, -1)).tolist()
        unusable = [row for row, token in enumerate(tokens) if token < 0]
        return Sampled(
            tokens=tuple(NO_CHOICE if token < 0 else token for token in tokens),
            logprobs=logprobs,
            nan_counts={row: self.count_unusable(edited[row]) for row in unusable},
        )

    def count_unusable(self, row: Tensor) -> int:
        """Return how many of a row's logits [V] are NaN or +inf."""
        return int(self.device.to_host((row.isnan() | row.isposinf()).sum()))

    def edit(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """Return a float32 copy of the logits with what the requests of ``batch`` ask changed."""
        to_device = self.device.to_device
        edited = logits.to(torch.float32, copy=True).contiguous()
        for row, allowed in batch.grammar.items():
            edited[row].masked_fill_(to_device(~allowed, torch.bool), -torch.inf)
        if batch.allowed is not None:
            edits.allow_only(edited, batch.allowed, to_device)
        if batch.banned is not None:
            edits.forbid(edited, batch.banned, to_device)
        if batch.bias is not None:
            edits.add_bias(edited, *batch.bias, to_device)
        if batch.processors is not None:
            batch.processors.change(edited)
        if batch.penalties is not None:
            edits.penalise(edited, batch.penalties, to_device, self.operations.penalise)
        return edited

    def scale(
        self,
        logits: Tensor,
        rows: Tensor,
        draws: Draws,
        processors: AppliedProcessors | None = None,
    ) -> Tensor:
        """Return the logits [m, V] of the rows that ``draws`` describes over their temperature and
        as processors refine them, the best of each row moved to 0.
        """
        chosen = logits if len(draws.rows) == len(logits) else logits.index_select(0, rows)
        heated = bool((draws.temperature != 1).any())
        temperature = self._floats(draws.temperature) if heated else None
        min_p = None if draws.min_p is None else self._floats(draws.min_p)
        scaled = self.operations.temper(chosen.to(torch.float32), temperature, min_p)
        if processors is not None and processors.refining:
            processors.refine(scaled, draws.rows)
            scaled = scaled - scaled.amax(-1, keepdim=True)
        return scaled

    def processed(self, edited: Tensor, scaled: Tensor, batch: SamplingBatch) -> Tensor:
        """Return the logits [n, V] that tokens are chosen from: ``edited``, but for rows that are
        drawn and ask for log-probabilities, which are ``scaled`` by their temperature and -inf
        where they are cut.
        """
        draws = batch.draws
        asking = {ask.row for ask in batch.logprobs}
        rows = [] if draws is None else draws.rows.tolist()
        places = np.asarray([place for place, row in enumerate(rows) if row in asking], np.int64)
        if draws is None or not len(places):
            return edited
        index = self.device.to_device(places, torch.int64)
        left = scaled.index_select(0, index)
        if draws.top_k is not None and draws.top_p is not None:
            top_k = self.device.to_device(draws.top_k[places], torch.int64)
            left = self.operations.truncate(left, top_k, self._floats(draws.top_p[places]))
        target = self.device.to_device(draws.rows[places], torch.int64)
        best = edited.index_select(0, target).to(torch.float32).amax(-1)
        best = best / self._floats(draws.temperature[places])
        return edited.to(torch.float32).index_copy(0, target, left + best[:, None])

    def draw(self, scaled: Tensor, draws: Draws) -> Tensor:
        """Return the drawn ids int64 [m] of the rows ``scaled`` [m, V], which are used up."""
        keys = self.device.to_device(draws.keys, torch.int64)
        if draws.top_k is None or draws.top_p is None:
            return filters.draw(scaled, keys)
        return self._draw_mixed(scaled, keys, draws.top_k, draws.top_p)

    def _draw_mixed(
        self, scaled: Tensor, keys: Tensor, top_k: np.ndarray, top_p: np.ndarray
    ) -> Tensor:
        """Rows that cut are ranked, the others drawn over the whole vocabulary: a row's path never
        depends on its neighbours.
        """
        cuts = (top_k > 0) | (top_p < 1)
        cut = self.device.to_device(np.flatnonzero(cuts), torch.int64)
        everyone = bool(cuts.all())
        drawn = self.operations.draw_truncated(
            scaled if everyone else scaled.index_select(0, cut),
            keys if everyone else keys.index_select(0, cut),
            self.device.to_device(top_k[cuts], torch.int64),
            self._floats(top_p[cuts]),
            largest_k=int(top_k.max()),
            all_cut_by_k=bool((top_k[cuts] > 0).all()),
            anyone=lambda flags: self.device.to_host(flags).nonzero()[:, 0].tolist(),
        )
        if everyone:
            return drawn
        rest = self.device.to_device(np.flatnonzero(~cuts), torch.int64)
        whole = filters.draw(scaled.index_select(0, rest), keys.index_select(0, rest))
        return torch.empty_like(keys).index_copy_(0, cut, drawn).index_copy_(0, rest, whole)

    def _floats(self, values: np.ndarray) -> Tensor:
        return self.device.to_device(values, torch.float32)
