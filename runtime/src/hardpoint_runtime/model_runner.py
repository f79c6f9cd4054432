"""TorchModelRunner: one step from plan to tokens, on any torch device.

Only the order of the work is here; every part is a collaborator, made in one ``make_*`` method that
a plugin may override. Owned by a TorchWorker, used on its thread alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from attrs import evolve
from hardpoint.errors import LifecycleError, UnsupportedError
from hardpoint.messages import ModelRunnerOutput, StepTicket
from hardpoint.model_runner import ModelRunner
from hardpoint.records import LoadReport, WarmUpReport
from hardpoint.references import resolve

from hardpoint_runtime.attention.builder import AttentionMetadataBuilder
from hardpoint_runtime.batch.block_table import BlockTables
from hardpoint_runtime.batch.columns import Column
from hardpoint_runtime.batch.inputs import BatchInputs, batch_order, build_inputs
from hardpoint_runtime.batch.requests import Requests, make_columns
from hardpoint_runtime.batch_timing import BatchTiming
from hardpoint_runtime.collaborators import made
from hardpoint_runtime.description import described
from hardpoint_runtime.device import DTYPES
from hardpoint_runtime.forward_context import ForwardContext, entered
from hardpoint_runtime.graphs.collectives import recordable
from hardpoint_runtime.graphs.identity import place
from hardpoint_runtime.graphs.modes import GraphMode
from hardpoint_runtime.graphs.piecewise import split_operations
from hardpoint_runtime.graphs.plan import GraphPlan
from hardpoint_runtime.graphs.planning import plan_graphs
from hardpoint_runtime.graphs.programs import ProgramGraphs
from hardpoint_runtime.graphs.steps import StepGraphs, write_tokens
from hardpoint_runtime.graphs.support import attention_support
from hardpoint_runtime.loading.checkpoint import load_checkpoint
from hardpoint_runtime.memory.kv_cache import KVCache
from hardpoint_runtime.memory.workspace import Workspace
from hardpoint_runtime.models import attention_needs, build_model
from hardpoint_runtime.operations import resolve as resolve_operations
from hardpoint_runtime.parallel.pipeline import StageLine
from hardpoint_runtime.parallel.seat import ALONE, Seat
from hardpoint_runtime.pooling import Pooled, Pooling
from hardpoint_runtime.quantization.resolution import named_quantization
from hardpoint_runtime.sampling.batch import build_sampling_batch
from hardpoint_runtime.sampling.columns import SAMPLING_COLUMNS
from hardpoint_runtime.sampling.logprobs import LogprobsMode
from hardpoint_runtime.sampling.processors import Processors
from hardpoint_runtime.sampling.prompt_logprobs import PromptLogprobs, output_rows
from hardpoint_runtime.sampling.sampler import Sampler
from hardpoint_runtime.waiting_steps import WaitingStep, WaitingSteps
from hardpoint_runtime.warm_up import profile, warm_up

if TYPE_CHECKING:
    from hardpoint.kv_cache import KVCacheConfig, KVCacheSpec
    from hardpoint.messages import GrammarOutput, SchedulerOutput
    from hardpoint.platform import Platform
    from hardpoint.records import WorkerContext
    from hardpoint.registry import Registry

    from hardpoint_runtime.attention.metadata import AttentionMetadata
    from hardpoint_runtime.device import DeviceOps
    from hardpoint_runtime.graphs.static_buffers import StaticBatch
    from hardpoint_runtime.models import LanguageModel
    from hardpoint_runtime.operations import Operations
    from hardpoint_runtime.quantization import Quantization


class TorchModelRunner(ModelRunner):
    """Executes steps of one torch model on one rank.

    Built by ``TorchWorker.make_model_runner`` after ``init_device``. Attributes for plugins:
    ``device``, ``seat`` (set by the worker before ``load_model``), ``operations``, ``model``,
    ``requests``, ``kv_cache``, ``sampler``. Of several tensor shards each samples, from the same
    logits with the same draws; of several pipeline stages the last.
    """

    def __init__(
        self, context: WorkerContext, platform: Platform, registry: Registry, device: DeviceOps
    ) -> None:
        self.context = context
        self.config = context.config
        self.platform = platform
        self.registry = registry
        self.device = device
        self.description = described(context)
        self.dtype = DTYPES[self.config.model.dtype]
        self.max_model_len = self.config.model.max_model_len or self.description.context_length
        self.context_extra = dict(platform.context(self.config))
        self.operations: Operations | None = None
        self.model: LanguageModel | None = None
        self.layers: Mapping[str, torch.nn.Module] = {}
        self.kv_cache: KVCache | None = None
        self.requests: Requests | None = None
        self.builders: tuple[AttentionMetadataBuilder, ...] = ()
        self.sampler: Sampler | None = None
        self.processors: Processors | None = None
        self.graph_plan = GraphPlan.eager()
        self.graphs: StepGraphs | ProgramGraphs | None = None
        self.timing = self.make_timing()
        self.logprobs_mode = LogprobsMode.named(self.config.sampling.logprobs_mode)
        self.prompt_logprobs = PromptLogprobs(
            device, self.config.scheduler.max_num_seqs or 1, self.logprobs_mode
        )
        self.pooling = Pooling(device)
        self.workspace = Workspace(device)
        self.profiled = False
        self.seat: Seat = ALONE
        self.line: StageLine | None = None
        self._waiting = WaitingSteps()

    # Collaborators: override one to change a part.

    def make_operations(self) -> Operations:
        """Resolve the named operations for this platform and model, once."""
        description, cache = self.description, self.config.cache
        heads = self.seat.heads(description)
        needs = {
            "device": self.device.device.type,
            "dtype": self.config.model.dtype,
            "kv_cache_dtype": self._kv_cache_dtype(),
            "block_size": cache.block_size,
            "head_size": description.head_size,
            "num_heads": heads.query.size,
            "num_kv_heads": heads.kv.size,
            **attention_needs(description, self.registry, self.platform.name),
        }
        return resolve_operations(self.registry, self.platform.name, needs)

    def make_model(self, operations: Operations) -> LanguageModel:
        """Construct the model on the device, its weights not yet defined. Its context length is
        what is served: some turn positions otherwise for a longer one.
        """
        return build_model(
            evolve(self.description, context_length=self.max_model_len),
            operations,
            self.device,
            self.dtype,
            registry=self.registry,
            platform_name=self.platform.name,
            seat=recordable(self.seat) if self.graph_plan.graphs else self.seat,
        )

    def make_quantization(self, model: LanguageModel) -> Quantization | None:
        """Build what packs the weights of ``model``; None: they are held as numbers."""
        return named_quantization(self.config, self.registry, self.platform.name, self.dtype)

    def load_weights(self, model: LanguageModel) -> None:
        """Stream the checkpoint into the model."""
        quantization = self.make_quantization(model)
        load_checkpoint(
            model, self.context, self.registry, self.platform.name, self.dtype, quantization
        )

    def make_kv_cache(self, kv_cache_config: KVCacheConfig) -> KVCache:
        """Allocate the KV cache and bind it to the layers. Raises MemoryBudgetError if the device
        does not give that much.
        """
        return KVCache.allocate(kv_cache_config, self.device, self.operations)

    def make_requests(self, kv_cache_config: KVCacheConfig) -> Requests:
        """Build the table of requests: slots for ``max_num_seqs``, columns, block tables."""
        slots = self.config.scheduler.max_num_seqs or 1
        columns = make_columns(self.max_model_len, slots, self.make_columns())
        tables = BlockTables(columns, kv_cache_config, max_model_len=self.max_model_len)
        return Requests(columns, tables, self.max_model_len)

    def make_columns(self) -> Sequence[Column]:
        """Return the columns beside the built-in ones: sampling's, and those that plugins offer."""
        offered = self.registry.offers("hardpoint_batch_columns", self.platform.name)
        return (*SAMPLING_COLUMNS, *(resolve(offer.reference) for offer in offered.values()))

    def make_metadata_builders(
        self, kv_cache_config: KVCacheConfig
    ) -> Sequence[AttentionMetadataBuilder]:
        """Return one attention metadata builder for each KV cache group."""
        return [
            AttentionMetadataBuilder(self.device, group.spec.block_size, self.operations)
            for group in kv_cache_config.groups
        ]

    def make_sampler(self) -> Sampler:
        """Build the sampler."""
        return Sampler(self.device, self.logprobs_mode, self.operations)

    def make_graph_plan(self, operations: Operations) -> GraphPlan:
        """Return which graphs steps may replay; none of them is made yet. Raises ConfigError for a
        ``graph_mode`` that cannot be had.
        """
        default = GraphMode.named(self.device.default_graph_mode)
        if self.config.graph.graph_mode in (None, "none") and default is GraphMode.NONE:
            return GraphPlan.eager()
        return plan_graphs(
            self.config,
            self.registry,
            self.platform.name,
            self.device,
            support=attention_support(operations),
            default=default,
        )

    def make_graphs(self, plan: GraphPlan) -> StepGraphs | ProgramGraphs:
        """Return what makes the graphs of a plan and replays them."""
        return ProgramGraphs(self, plan) if plan.any_shape else StepGraphs(self, plan)

    def make_timing(self) -> BatchTiming | None:
        """Return what times steps by their size, where that is asked for."""
        interval = self.config.observability.batch_timing_interval
        return None if interval is None else BatchTiming(interval, self.device)

    # The life of a runner, in order.

    def load_model(self) -> LoadReport:
        """Construct the model and load its weights; report their bytes and the seconds it took."""
        started = time.perf_counter()
        operations = made(self.make_operations)
        self.graph_plan = self.make_graph_plan(operations)
        if self.graph_plan.mode.needs_splitting:
            operations = split_operations(operations)
        self.operations = operations
        model = made(self.make_model, operations)
        self.load_weights(model)
        self.model = model
        self.layers = dict(model.named_modules())
        if self.seat.pipeline is not None:
            self.line = StageLine(self.seat.pipeline, self.dtype, self.device)
        self.device.synchronize()
        held = {
            place(tensor): tensor.numel() * tensor.element_size()
            for tensor in (*model.parameters(), *model.buffers())
        }
        seconds = time.perf_counter() - started
        return LoadReport(weight_bytes=sum(held.values()), seconds=seconds)

    def get_model(self) -> LanguageModel:
        """Return the torch module; raises LifecycleError before ``load_model``."""
        if self.model is None:
            self._missing("get_model", "load_model")
        return self.model

    def get_kv_cache_spec(self) -> Mapping[str, KVCacheSpec]:
        """Return layer name -> what the layer keeps per block."""
        limits = self.platform.limits(self.config)
        block_size = self.config.cache.block_size or limits.block_sizes[0]
        return self.get_model().kv_cache_spec(block_size, self._kv_cache_dtype())

    def profile_run(self) -> None:
        """Allocate what the largest step allocates beside weights and KV cache."""
        profile(self)

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache, and build what depends on its shape."""
        self.kv_cache = made(self.make_kv_cache, kv_cache_config)
        self.requests = made(self.make_requests, kv_cache_config)
        self.builders = tuple(made(self.make_metadata_builders, kv_cache_config))
        self.sampler = made(self.make_sampler)
        self.processors = Processors.load(self.config, self.registry, self.platform, self.requests)

    def warm_up(self) -> WarmUpReport:
        """Run a decode, a prefill and every way of sampling once, with rows that belong to nobody.

        Nothing is written to the cache, no request is made and no generator is touched, so that
        later outputs are as if it had not run. Then the graphs of the plan are made.
        """
        started = time.perf_counter()
        if self.kv_cache is None or self.sampler is None:
            self._missing("warm_up", "initialize_kv_cache")
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None
        self.workspace.unlock()
        with self.device.inference():
            warm_up(self, self.kv_cache, self.sampler)
            if self.graph_plan.graphs:
                graphs = self.make_graphs(self.graph_plan)
                graphs.capture_all()
                self.graphs = graphs
        self.workspace.lock()
        self.device.synchronize()
        return WarmUpReport(language_s=time.perf_counter() - started)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Adopt a longest length; the tables become as wide. Raises MessageError if a known request
        is longer, LifecycleError if graphs were captured for shorter ones.
        """
        if self.graphs is not None and max_model_len > self.graphs.longest:
            raise LifecycleError(
                f"max_model_len = {max_model_len}: graphs were captured for at most "
                f"{self.graphs.longest} tokens a request"
            )
        if self.requests is not None:
            self.requests.resize(max_model_len)
        self.max_model_len = max_model_len

    def close(self) -> None:
        """Drop the model, the cache and the requests."""
        if self.graphs is not None:
            self.graphs.close()
        self.model = self.kv_cache = self.requests = self.sampler = self.graphs = None
        self.operations, self.line, self.layers = None, None, {}
        self.workspace.clear()
        self._waiting.clear()
        self.builders = ()

    # One step.

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | StepTicket:
        """Run one step, in the documented order; see :class:`hardpoint.model_runner.ModelRunner`.

        Raises MessageError, before anything but the finished and preempted requests has changed,
        for a plan that contradicts itself or what is known here. Whatever a pipeline stage raises,
        the next one hears of it instead of waiting.
        """
        try:
            return self._execute(scheduler_output)
        except BaseException as error:
            if self.line is not None and scheduler_output.total_tokens:
                self.line.skip(scheduler_output.step_id, error)
            raise

    def _execute(self, plan: SchedulerOutput) -> ModelRunnerOutput | StepTicket:
        started = time.perf_counter()
        self.apply(plan)
        inputs = logits = stats = None
        prepared = time.perf_counter()
        if plan.total_tokens:
            inputs = self.prepare(plan)
            prepared = time.perf_counter()
            with self.device.inference():
                logits = self.forward(inputs, plan)
            stats = None if self.graphs is None else self.graphs.count(inputs)
        step = WaitingStep(
            step_id=plan.step_id,
            generation=plan.generation,
            inputs=inputs,
            logits=logits,
            pooled=self.pooling.take(self.requests, plan.num_tokens) if self.requests else Pooled(),
            graph_stats=stats,
            prepare=prepared - started,
            forward=time.perf_counter() - prepared,
        )
        if plan.defer_sampling:
            self._waiting.keep(step)
            return StepTicket(step_id=plan.step_id, generation=plan.generation)
        return self.finish(step, None)

    def sample_tokens(self, ticket: StepTicket, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Choose the tokens of the step that waits. Raises LifecycleError if it is another one."""
        return self.finish(self._waiting.take(ticket), grammar)

    def apply(self, plan: SchedulerOutput) -> None:
        """Bring the requests and the cache up to the plan."""
        if self.requests is None or self.kv_cache is None:
            self._missing("execute_model", "initialize_kv_cache")
        requests, kv_cache = self.requests, self.kv_cache
        plan.check()
        if plan.drafts:
            raise UnsupportedError("speculative decoding", f"platform {self.platform.name!r}")
        self._waiting.abandon(plan, most=self.seat.topology.pipeline)
        requests.forget(plan.finished)
        requests.park(plan.preempted)
        requests.check(plan)
        with self.device.inference():
            kv_cache.zero_blocks(plan.blocks_to_zero)
            kv_cache.copy_blocks(plan.block_copies)
        for request in plan.new:
            requests.add(request)
        requests.update(plan)

    def prepare(self, plan: SchedulerOutput) -> BatchInputs:
        """Return the step's inputs, in batch order."""
        if self.requests is None:
            self._missing("execute_model", "initialize_kv_cache")
        order = batch_order(plan.num_tokens)
        counts = [plan.num_tokens[req_id] for req_id in order]
        dispatch = self.graphs and self.graphs.dispatch(plan.total_tokens, len(order), max(counts))
        device = self.operations is not None and self.operations.maps_slots
        return build_inputs(self.requests, order, counts, dispatch=dispatch, device_slots=device)

    def forward(self, inputs: BatchInputs, plan: SchedulerOutput) -> torch.Tensor | None:
        """Run the model; return the logits [m, V] of the rows to sample, None if there are none."""
        model = self.get_model()
        if isinstance(self.graphs, ProgramGraphs) and (program := self.graphs.serving(inputs)):
            return self.graphs.run(program, inputs, plan)
        replayed = None if self.graphs is None else self.graphs.find(inputs.dispatch)
        batch = None if replayed is None else replayed.batch
        if batch is None:
            token_ids = self.device.to_device(inputs.token_ids, torch.int64)
            positions = self.device.to_device(inputs.positions, torch.int64)
        else:
            token_ids, positions = batch.token_ids, batch.positions
            write_tokens(self.device, inputs, batch)
        context = self.make_forward_context(inputs, batch, plan)
        scored = self.requests and self.prompt_logprobs.rows(self.requests, inputs)
        pooled = self.requests and self.pooling.rows(self.requests, inputs)
        rows = output_rows(inputs, (scored, pooled), self.device)
        timing = self.timing and self.timing.measured(len(inputs.row_of_token))
        with entered(context), timing or contextlib.nullcontext():
            run: Any = model if replayed is None else replayed
            if self.line is None:
                hidden = run(token_ids, positions, context, rows)
            else:
                hidden = self.line.run(run, token_ids, positions, context, rows)
            hidden = self.pooling.pool(pooled, hidden)
            if hidden is not None and scored is not None:
                hidden = self.prompt_logprobs.score(scored, hidden, model.compute_logits)
            if hidden is None or not len(inputs.logits_rows):
                return None
            return model.compute_logits(hidden)

    def make_forward_context(
        self, inputs: BatchInputs, batch: StaticBatch | None, plan: SchedulerOutput | None = None
    ) -> ForwardContext:
        """Return the step as its layers see it. ``batch``: the static buffers of the graph that it
        replays; ``plan``: None where it belongs to nobody.
        """
        if self.kv_cache is None:
            self._missing("execute_model", "initialize_kv_cache")
        dispatch = inputs.dispatch
        return ForwardContext(
            attention=self.build_attention(inputs, batch),
            kv_caches=self.kv_cache.layers,
            layers=self.layers,
            graph_mode="NONE" if dispatch is None else dispatch.mode.name,
            batch_key=None if batch is None or dispatch is None else dispatch.key,
            num_tokens=len(inputs.row_of_token),
            workspace=self.workspace,
            step_id=-1 if plan is None else plan.step_id,
            extra=self.context_extra if plan is None else {**self.context_extra, **plan.extra},
            cancelled=self.context.cancelled,
        )

    def build_attention(
        self, inputs: BatchInputs, batch: StaticBatch | None = None
    ) -> dict[str, AttentionMetadata]:
        """Return layer name -> attention metadata; layers of one group share theirs.

        With the static buffers of a FULL graph, ``batch``, it is written into them.
        """
        by_layer: dict[str, AttentionMetadata] = {}
        if self.kv_cache is None:
            return by_layer
        for index, (builder, group) in enumerate(
            zip(self.builders, self.kv_cache.plan.groups, strict=True)
        ):
            values: dict[str, Any] = {
                "query_start": inputs.query_start.tolist(),
                "seq_lens": inputs.seq_lens.tolist(),
                "block_table": inputs.block_tables[index],
                "slots": inputs.cache_slots[index] if inputs.cache_slots else None,
                "positions": inputs.positions,
                "num_reqs": len(inputs.req_ids),
                "num_tokens": len(inputs.row_of_token),
            }
            if batch is None or not batch.groups:
                metadata = builder.build(**values)
            else:
                metadata = builder.build_for_graph(
                    batch.groups[index], max_query=batch.max_query, **values
                )
            by_layer.update(dict.fromkeys(group.layers, metadata))
        return by_layer

    def finish(self, step: WaitingStep, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Choose tokens, keep them, and return the step's output.

        Rows of unfinished prompts are not sampled: theirs is an empty tuple.
        """
        started = time.perf_counter()
        if step.inputs is None or step.logits is None:
            return step.output(None, sample=0.0)
        if self.requests is None or self.sampler is None:
            self._missing("sample_tokens", "initialize_kv_cache")
        ids = step.inputs.sampled_ids
        batch = build_sampling_batch(
            self.requests,
            ids,
            vocab_size=step.logits.shape[1],
            eos_token_ids=self.description.eos_token_ids,
            grammar=grammar,
            processors=self.processors and self.processors.begin(ids),
        )
        with self.device.inference():
            sampled = self.sampler.sample(step.logits, batch)
        for req_id, token in zip(ids, sampled.tokens, strict=True):
            self.requests.append_token(req_id, token)
        prompts = self.prompt_logprobs.take(self.requests, step.inputs)
        return step.output(sampled, prompts, sample=time.perf_counter() - started)

    def _kv_cache_dtype(self) -> str:
        dtype = self.config.cache.kv_cache_dtype
        return self.config.model.dtype if dtype == "auto" else dtype

    def _missing(self, method: str, step: str) -> NoReturn:
        raise LifecycleError(f"{method} was called before {step}")
