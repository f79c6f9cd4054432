"""What a torch worker predicts, kept for comparison: for ``hardpoint doctor --fidelity``.

Worker methods, called by the engine through ``collective_rpc``: each gets the worker first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import define
from hardpoint.errors import UnsupportedError
from torch import Tensor

from hardpoint_runtime.sampling.sampler import Sampler

if TYPE_CHECKING:
    from hardpoint_runtime.sampling.batch import SamplingBatch
    from hardpoint_runtime.sampling.sampler import Sampled

ROWS = 16
"""Rows that are compared at once."""


class Recorder(Sampler):
    """Another sampler, of whose logits it keeps the log-probabilities, float32 [1, V] each time."""

    def __init__(self, other: Sampler) -> None:
        vars(self).update(vars(other))
        self.other, self.rows = other, list[Tensor]()

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """See :class:`Sampler`."""
        self.rows.append(logits.detach().float().log_softmax(-1).cpu())
        return self.other.sample(logits, batch)


@define
class Difference:
    """How one model's predictions differ from the reference's: ``kl``, the mean Kullback-Leibler
    divergence in nats of the reference from it, ``top1``, the share of places where both have the
    same most likely token, among ``places``.
    """

    kl: float
    top1: float
    places: int


def start_recording(worker: Any) -> None:
    """Keep all predictions from now on. Raises UnsupportedError for a worker that is not torch's,
    or that samples nothing.
    """
    runner = worker.get_model_runner() if hasattr(worker, "get_model_runner") else None
    if not isinstance(getattr(runner, "sampler", None), Sampler):
        raise UnsupportedError("fidelity", f"a {type(worker).__name__}", reason="it has no sampler")
    runner.sampler = Recorder(runner.sampler)


def recorded(worker: Any) -> Tensor:
    """Return what was kept, float32 [places, V], and keep nothing more."""
    runner = worker.get_model_runner()
    recorder = runner.sampler
    runner.sampler = recorder.other
    return torch.cat(recorder.rows)


def difference(worker: Any, reference: Tensor) -> Difference:
    """Compare what was kept with the reference's."""
    found = recorded(worker)
    kl = same = 0.0
    for ours, theirs in zip(found.split(ROWS), reference.split(ROWS), strict=True):
        kl += float((theirs.exp() * (theirs - ours)).double().sum())
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
    return Difference(kl=kl / len(found), top1=same / len(found), places=len(found))
