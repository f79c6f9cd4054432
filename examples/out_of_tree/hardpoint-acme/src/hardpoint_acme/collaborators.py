"""The parts of a runner, each the toolkit's with what a unit has of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from attrs import evolve, fields, frozen
from hardpoint.errors import ConfigError
from hardpoint_runtime.attention.builder import AttentionMetadataBuilder
from hardpoint_runtime.attention.metadata import AttentionMetadata
from hardpoint_runtime.batch.columns import Column
from hardpoint_runtime.batch.requests import Requests
from hardpoint_runtime.batch_timing import BatchTiming
from hardpoint_runtime.graphs.captured import CaptureReport
from hardpoint_runtime.graphs.plan import GraphPlan
from hardpoint_runtime.graphs.steps import StepGraphs
from hardpoint_runtime.memory.kv_cache import KVCache
from hardpoint_runtime.operations import Operations
from hardpoint_runtime.sampling.batch import SamplingBatch
from hardpoint_runtime.sampling.sampler import Sampled, Sampler
from torch import Tensor

from hardpoint_acme.messages import bank_of

MOST_GRAPHS = 256
"""Entries of a unit's table of programs."""

BANK = Column(name="acme_bank", dtype="int8", default=0, pad=0, read=lambda new: bank_of(new.extra))


@frozen(kw_only=True)
class AcmeOperations(Operations):
    """The operations of one model, and how many of them are the unit's own."""

    own: int = 0

    @classmethod
    def of(cls, operations: Operations) -> Self:
        """Return the same operations, counted."""
        values = {each.name: getattr(operations, each.name) for each in fields(Operations)}
        own = sum(each.reference != "built-in" for each in operations.choices)
        return cls(**values, own=own)


class AcmeKVCache(KVCache):
    """Counts the blocks that were zeroed and copied."""

    zeroed = copied = 0

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Set the blocks to zero."""
        self.zeroed += len(block_ids)
        super().zero_blocks(block_ids)

    def copy_blocks(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """Copy blocks."""
        copies = tuple(copies)
        self.copied += len(copies)
        super().copy_blocks(copies)


class AcmeRequests(Requests):
    """Knows beside which bank each request would like to be."""

    def banks(self, req_ids: Iterable[str]) -> dict[str, int]:
        """Return request -> bank."""
        bank = self.columns[BANK.name]
        return {req_id: int(bank[self.slot_of(req_id)]) for req_id in req_ids if req_id in self}


class AcmeMetadataBuilder(AttentionMetadataBuilder):
    """Counts the steps that it built for: ``built``."""

    built = 0

    def build(self, **values: Any) -> AttentionMetadata:
        """Return the metadata of one step."""
        self.built += 1
        return super().build(**values)


class AcmeSampler(Sampler):
    """Counts the tokens chosen since it was last asked."""

    count = 0

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """Choose a token for each row."""
        sampled = super().sample(logits, batch)
        self.count += len(sampled.tokens)
        return sampled

    def take_count(self) -> int:
        """Return the count, and begin anew."""
        count, self.count = self.count, 0
        return count


def within_table(plan: GraphPlan) -> GraphPlan:
    """Return ``plan``; raise ConfigError if a unit cannot hold that many graphs."""
    if len(plan.graphs) > MOST_GRAPHS:
        raise ConfigError(
            f"{len(plan.graphs)} graphs are more than the {MOST_GRAPHS} that a unit holds; name "
            "fewer graph_sizes"
        )
    return evolve(plan)


class AcmeGraphs(StepGraphs):
    """Keeps the report of what was captured: ``report``."""

    report: CaptureReport | None = None

    def capture_all(self) -> CaptureReport:
        """Make every graph of the plan."""
        self.report = super().capture_all()
        return self.report


class AcmeTiming(BatchTiming):
    """Counts the batches that it measured: ``batches``."""

    batches = 0

    @contextmanager
    def measured(self, num_tokens: int) -> Iterator[None]:
        """Measure a batch."""
        with super().measured(num_tokens):
            yield
        self.batches += 1
