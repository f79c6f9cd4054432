"""The runner: the toolkit's, with every collaborator replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve
from hardpoint.kv_cache import KVCacheConfig
from hardpoint.messages import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from hardpoint_runtime.attention.builder import AttentionMetadataBuilder
from hardpoint_runtime.batch.block_table import BlockTables
from hardpoint_runtime.batch.columns import Column
from hardpoint_runtime.batch.inputs import BatchInputs
from hardpoint_runtime.batch.requests import make_columns
from hardpoint_runtime.batch_timing import BatchTiming
from hardpoint_runtime.forward_context import ForwardContext
from hardpoint_runtime.graphs.plan import GraphPlan
from hardpoint_runtime.graphs.static_buffers import StaticBatch
from hardpoint_runtime.model_runner import TorchModelRunner
from hardpoint_runtime.models import LanguageModel
from hardpoint_runtime.operations import Operations
from hardpoint_runtime.quantization import Quantization
from hardpoint_runtime.waiting_steps import WaitingStep

from hardpoint_acme import collaborators as own
from hardpoint_acme.messages import NAME, StepReport


class AcmeModelRunner(TorchModelRunner):
    """One rank of a model on one unit. Says in each step's ``extra`` what it did."""

    report: StepReport | None = None

    # Collaborators.

    def make_operations(self) -> Operations:
        """Resolve the operations."""
        return own.AcmeOperations.of(super().make_operations())

    def make_model(self, operations: Operations) -> LanguageModel:
        """Construct the model: the toolkit's own, by the unit's operations."""
        return super().make_model(operations)

    def make_quantization(self, model: LanguageModel) -> Quantization | None:
        """Return what the key ``quantization`` names: ``acme8``, of this plugin."""
        return super().make_quantization(model)

    def make_kv_cache(self, kv_cache_config: KVCacheConfig) -> own.AcmeKVCache:
        """Allocate the cache on the unit."""
        return own.AcmeKVCache.allocate(kv_cache_config, self.device)

    def make_requests(self, kv_cache_config: KVCacheConfig) -> own.AcmeRequests:
        """Build the table of requests, which knows their banks."""
        slots = self.config.scheduler.max_num_seqs or 1
        columns = make_columns(self.max_model_len, slots, self.make_columns())
        tables = BlockTables(columns, kv_cache_config, max_model_len=self.max_model_len)
        return own.AcmeRequests(columns, tables, self.max_model_len)

    def make_columns(self) -> Sequence[Column]:
        """Return the toolkit's columns and the bank."""
        return (*super().make_columns(), own.BANK)

    def make_metadata_builders(
        self, kv_cache_config: KVCacheConfig
    ) -> Sequence[AttentionMetadataBuilder]:
        """Return a builder for each group."""
        return [
            own.AcmeMetadataBuilder(self.device, group.spec.block_size)
            for group in kv_cache_config.groups
        ]

    def make_sampler(self) -> own.AcmeSampler:
        """Build the sampler."""
        return own.AcmeSampler(self.device)

    def make_graph_plan(self, operations: Operations) -> GraphPlan:
        """Return which graphs steps may replay: at most what the unit's table holds."""
        return own.within_table(super().make_graph_plan(operations))

    def make_graphs(self, plan: GraphPlan) -> own.AcmeGraphs:
        """Return what makes the graphs and replays them."""
        return own.AcmeGraphs(self, plan)

    def make_timing(self) -> BatchTiming | None:
        """Return what times steps, where that is asked for."""
        interval = self.config.observability.batch_timing_interval
        return None if interval is None else own.AcmeTiming(interval, self.device)

    def make_forward_context(
        self, inputs: BatchInputs, batch: StaticBatch | None, plan: SchedulerOutput | None = None
    ) -> ForwardContext:
        """Return the step as its layers see it, and which unit they are on."""
        context = super().make_forward_context(inputs, batch, plan)
        return evolve(context, extra={**context.extra, "acme_unit": self.device.device.index})

    # One step.

    def finish(self, step: WaitingStep, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Choose tokens, and report."""
        output = super().finish(step, grammar)
        requests, sampler = self.requests, self.sampler
        if not isinstance(requests, own.AcmeRequests) or not isinstance(sampler, own.AcmeSampler):
            return output
        banks = requests.banks(output.req_ids)
        self.report = StepReport(banks=banks, sampled=sampler.take_count())
        extra: dict[str, Any] = {**output.extra, NAME: self.report}
        return evolve(output, extra=extra)
