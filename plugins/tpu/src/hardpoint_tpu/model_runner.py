"""TpuModelRunner: one step from plan to tokens, in pieces of static shapes.

Only the order of the work is here. Owned by a TpuWorker, used on its thread alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, cast

import jax
import numpy as np
from attrs import evolve, frozen
from hardpoint.checkpoints import WeightSource, read_description
from hardpoint.checkpoints.sharded_state import SHARDED_STATE
from hardpoint.errors import CancelledStepError, HardpointError, LifecycleError, UnsupportedError
from hardpoint.kv_cache import KVCacheSpec
from hardpoint.messages import (
    GraphStats,
    Logprobs,
    MessageError,
    ModelRunnerOutput,
    StepTicket,
    StepTimings,
)
from hardpoint.model_runner import ModelRunner
from hardpoint.records import LoadReport, WarmUpReport
from jax.sharding import NamedSharding

from hardpoint_tpu.attention import table_width
from hardpoint_tpu.buckets import Buckets
from hardpoint_tpu.compilation_cache import Compilations, cache_folder, counted_compilations
from hardpoint_tpu.inputs import PieceInputs, build_piece
from hardpoint_tpu.kv_cache import KVCache
from hardpoint_tpu.loaded_model import LoadedModel
from hardpoint_tpu.programs import CACHE_BATCH, WHOLE, Programs, ProgramShape, make_mesh
from hardpoint_tpu.requests import Requests
from hardpoint_tpu.sampler import Sampler
from hardpoint_tpu.sampling import build_sampling, grammar_masks
from hardpoint_tpu.shape import ModelShape
from hardpoint_tpu.sharded_state import ShardedStateSource
from hardpoint_tpu.weights import open_weights

if TYPE_CHECKING:
    from hardpoint.checkpoints.description import ModelDescription
    from hardpoint.kv_cache import KVCacheConfig
    from hardpoint.messages import GrammarOutput, SchedulerOutput
    from hardpoint.platform import Platform
    from hardpoint.records import WorkerContext
    from hardpoint.registry import Registry

    from hardpoint_tpu.platform import TpuPlatform

_logger = logging.getLogger("hardpoint.worker")

KV_LAYER = "model.layers.{}.self_attn"


@frozen(kw_only=True, eq=False)
class Computed:
    """A piece whose forward is done: its inputs, and the logits [R, V] of its rows, None if nothing
    in it can be sampled.
    """

    inputs: PieceInputs
    logits: jax.Array | None


@frozen(kw_only=True, eq=False)
class WaitingStep:
    """A step whose forward is done and whose tokens are not chosen yet."""

    plan: SchedulerOutput
    req_ids: tuple[str, ...]
    pieces: tuple[Computed, ...]
    timings: StepTimings

    @property
    def padded(self) -> int:
        """Tokens computed, padding included."""
        return sum(piece.inputs.shape.tokens for piece in self.pieces)


class TpuModelRunner(ModelRunner):
    """Executes steps of one Llama on one worker's devices.

    ``devices`` are what the worker took. After loading: ``model``; after ``initialize_kv_cache``:
    ``cache``, ``requests``, ``programs``; after ``warm_up``: ``compilations``.
    """

    def __init__(
        self,
        context: WorkerContext,
        platform: Platform,
        registry: Registry,
        devices: Sequence[jax.Device],
    ) -> None:
        self.context = context
        self.config = context.config
        self.platform = cast("TpuPlatform", platform)
        self.registry = registry
        self.description = _described(context)
        self.shape = ModelShape.of(self.description, len(devices))
        self.mesh = make_mesh(list(devices))
        self.max_model_len = self.config.model.max_model_len or self.description.context_length
        self.compilations = Compilations()
        self.model: LoadedModel | None = None
        self.cache: KVCache | None = None
        self.requests: Requests | None = None
        self.programs: Programs | None = None
        self.sampler: Sampler | None = None
        self._waiting: WaitingStep | None = None

    @property
    def buckets(self) -> Buckets:
        """The static shapes of this configuration."""
        return self.platform.buckets(self.config)

    # The life of a runner, in order.

    def load_model(self) -> LoadReport:
        """Read the weights to the devices."""
        dtype = jax.numpy.dtype(self.config.model.dtype)
        self.model = LoadedModel(self.description, self.shape, self.mesh, dtype)
        return self.model.load(self._open_weights, self.context.cancelled)

    def reload_weights(self, path: str | None) -> LoadReport:
        """Read the weights again, from ``path`` or from where they came. Raises LifecycleError for
        a model of another shape.
        """
        model = self.get_model()
        if path is not None:
            model.described_by(read_description(path, self.config.load.load_format))
        return model.load(self._open_weights, self.context.cancelled)

    def get_model(self) -> LoadedModel:
        """Return the model; raises LifecycleError before ``load_model``."""
        if self.model is None:
            self._missing("get_model", "load_model")
        return self.model

    def get_kv_cache_spec(self) -> Mapping[str, KVCacheSpec]:
        """Return layer name -> spec. Its heads are those of all devices, padding included."""
        dtype = self.config.cache.kv_cache_dtype
        limits = self.platform.limits(self.config)
        spec = KVCacheSpec(
            block_size=self.config.cache.block_size or limits.block_sizes[0],
            num_kv_heads=self.shape.layout.kv_heads * self.shape.devices,
            head_size_k=self.shape.head,
            head_size_v=self.shape.head,
            dtype=self.config.model.dtype if dtype == "auto" else dtype,
        )
        return {KV_LAYER.format(index): spec for index in range(self.shape.layers)}

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache, and make what depends on its shape."""
        if len(kv_cache_config.groups) != 1:
            raise UnsupportedError(
                f"{len(kv_cache_config.groups)} KV cache groups", "platform 'tpu'"
            )
        spec = kv_cache_config.groups[0].spec
        dtype = jax.numpy.dtype(spec.dtype)
        self.cache = KVCache(kv_cache_config, self.mesh, dtype)
        width = table_width(self.max_model_len, spec.block_size)
        self.requests = Requests(
            capacity=self.config.scheduler.max_num_seqs or self.buckets.rows[-1],
            max_model_len=self.max_model_len,
            block_size=spec.block_size,
            width=width,
            num_blocks=kv_cache_config.num_blocks,
        )
        options = self.platform.options
        self.programs = Programs(
            self.shape,
            self.mesh,
            ProgramShape(
                buckets=self.buckets,
                table_width=width,
                group=options.layers_per_program or (1 if self.platform.on_cpu else 1 << 30),
                logprobs=min(options.max_logprobs, self.shape.vocabulary),
                dtype=jax.numpy.dtype(self.config.model.dtype),
                attention=options.attention,
                interpret=self.platform.on_cpu,
                logprobs_mode=self.config.sampling.logprobs_mode,
            ),
        )
        self.sampler = Sampler(self.programs)

    def warm_up(self) -> WarmUpReport:
        """Compile every program that a step can need. Nothing is run, so nothing is changed."""
        if self.programs is None or self.cache is None:
            self._missing("warm_up", "initialize_kv_cache")
        started = time.perf_counter()
        folder = cache_folder(self.platform.options.compilation_cache)
        with counted_compilations(folder) as counts:
            self.programs.compile_all(self.get_model().params, self.cache, self.context.cancelled)
        self.compilations = counts
        seconds = time.perf_counter() - started
        _logger.info(
            "rank %d: %d programs in %.1f s, %d of them from %s",
            self.context.rank, counts.asked, seconds, counts.cached, folder or "no cache",
        )  # fmt: skip
        return WarmUpReport(language_s=seconds)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Adopt a longest length; the block tables' width follows from it, so it must come before
        the cache is allocated.
        """
        if self.requests is not None and max_model_len > self.max_model_len:
            raise LifecycleError(
                f"max_model_len = {max_model_len}: the programs are made for {self.max_model_len}"
            )
        self.max_model_len = max_model_len
        if self.requests is not None:
            self.requests.max_model_len = max_model_len

    def close(self) -> None:
        """Drop the model, the cache, the programs and the requests."""
        if self.model is not None:
            self.model.release(keep=False)
        if self.cache is not None:
            self.cache.release()
        self.model = self.cache = self.requests = self.programs = self.sampler = None
        self._waiting = None

    # One step.

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | StepTicket:
        """Run one step: forget, zero and copy blocks, take in the changes, compute, sample.

        Raises MessageError, before anything but the finished and preempted requests has changed,
        for a plan that contradicts itself or what is known here.
        """
        started = time.perf_counter()
        plan = scheduler_output
        self.apply(plan)
        req_ids = tuple(plan.num_tokens)
        inputs = self.prepare(req_ids, [plan.num_tokens[req_id] for req_id in req_ids])
        prepared = time.perf_counter()
        pieces = tuple(self.forward(piece) for piece in inputs)
        timings = StepTimings(prepare=prepared - started, forward=time.perf_counter() - prepared)
        step = WaitingStep(plan=plan, req_ids=req_ids, pieces=pieces, timings=timings)
        if plan.defer_sampling:
            self._waiting = step
            return StepTicket(step_id=plan.step_id, generation=plan.generation)
        return self.finish(step, None)

    def sample_tokens(self, ticket: StepTicket, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Choose the tokens of the step that waits. Raises LifecycleError if it is another one."""
        step = self._waiting
        known = None if step is None else (step.plan.step_id, step.plan.generation)
        if step is None or known != (ticket.step_id, ticket.generation):
            waiting = "none" if step is None else f"step {step.plan.step_id}"
            raise LifecycleError(
                f"sample_tokens: step {ticket.step_id} does not wait for sampling (waiting: "
                f"{waiting})"
            )
        self._waiting = None
        return self.finish(step, grammar)

    def apply(self, plan: SchedulerOutput) -> None:
        """Bring the requests and the cache up to the plan."""
        if self.requests is None:
            self._missing("execute_model", "initialize_kv_cache")
        for asked in _unserved(plan):
            raise UnsupportedError(asked, "platform 'tpu'")
        self._abandon_waiting(plan)
        self.requests.apply(plan)
        self._zero(plan.blocks_to_zero)
        self._copy(plan.block_copies)

    def prepare(self, req_ids: Sequence[str], counts: Sequence[int]) -> list[PieceInputs]:
        """Return the step cut into pieces of static shapes, in the order of its requests."""
        if self.requests is None:
            self._missing("execute_model", "initialize_kv_cache")
        buckets = self.buckets
        return [
            build_piece(
                self.requests,
                shape,
                [req_ids[index] for index in members],
                [counts[index] for index in members],
                buckets.sampled_rows(shape),
            )
            for shape, members in buckets.pieces(counts)
        ]

    def forward(self, piece: PieceInputs) -> Computed:
        """Run the backbone over one piece, and the logits of the rows to sample if there are any.

        Raises CancelledStepError between two programs once the driver gave the step up.
        """
        if self.programs is None or self.cache is None:
            self._missing("execute_model", "initialize_kv_cache")
        stages, params, shape = self.programs.stages, self.get_model().params, piece.shape
        whole = NamedSharding(self.mesh, WHOLE)
        where = jax.device_put((piece.tables, piece.starts, piece.counts), whole)
        x, cos, sin = stages["embed"](
            shape, params.outer["embedding"], piece.token_ids, where[1], where[2]
        )
        for start, count in self.programs.groups:
            if self.context.cancelled():
                raise CancelledStepError("the driver ended this step before it was complete")
            layers = [dict(layer) for layer in params.layers[start : start + count]]
            x, written = stages[f"layers{count}"](
                shape, layers, self.cache.take(start, count), x, cos, sin, *where
            )
            self.cache.put(start, written)
        if not piece.sampled:
            return Computed(inputs=piece, logits=None)
        hidden = stages["select"](shape, params.outer["norm"], x, piece.rows)
        logits = stages["logits"](len(piece.rows), params.head, hidden)
        return Computed(inputs=piece, logits=logits)

    def finish(self, step: WaitingStep, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Choose tokens, keep them, and return the step's output.

        Rows of unfinished prompts are not sampled: theirs is an empty tuple.
        """
        if self.requests is None or self.sampler is None:
            self._missing("sample_tokens", "initialize_kv_cache")
        started = time.perf_counter()
        masks = grammar_masks(grammar, self.shape.vocabulary)
        chosen: dict[str, int] = {}
        logprobs: dict[str, Logprobs] = {}
        wrong: dict[str, int] = {}
        for piece in step.pieces:
            if piece.logits is None:
                continue
            ids = piece.inputs.sampled
            arrays = build_sampling(
                self.requests,
                ids,
                len(piece.inputs.rows),
                vocabulary=self.shape.vocabulary,
                eos_token_ids=self.description.eos_token_ids,
                masks=masks,
            )
            sampled = self.sampler.sample(piece.logits, arrays, len(ids))
            chosen.update(zip(ids, sampled.tokens, strict=True))
            logprobs.update({ids[row]: each for row, each in sampled.logprobs.items()})
            wrong.update({ids[row]: count for row, count in sampled.nan_counts.items()})
        for req_id, token in chosen.items():
            self.requests.append_token(req_id, token)
        return ModelRunnerOutput(
            step_id=step.plan.step_id,
            generation=step.plan.generation,
            req_ids=step.req_ids,
            tokens=tuple((chosen[r],) if r in chosen else () for r in step.req_ids),
            logprobs=logprobs,
            nan_counts=wrong,
            timings=evolve(step.timings, sample=time.perf_counter() - started),
            graph_stats=GraphStats(
                unpadded=step.plan.total_tokens, padded=step.padded, mode="compiled"
            )
            if step.pieces
            else None,
        )

    # Within.

    def _zero(self, blocks: Sequence[int]) -> None:
        for start in range(0, len(blocks), CACHE_BATCH):
            self._change_cache("zero", _filled(blocks[start : start + CACHE_BATCH]))

    def _copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy blocks in order: a block that was written is not read by the same call."""
        for batch in _copy_batches(copies):
            sources, targets = zip(*batch, strict=True)
            self._change_cache("copy", _filled(sources), _filled(targets))

    def _change_cache(self, stage: str, *blocks: np.ndarray) -> None:
        if self.programs is None or self.cache is None:
            self._missing("execute_model", "initialize_kv_cache")
        for start, count in self.programs.groups:
            written = self.programs.stages[f"{stage}{count}"](
                CACHE_BATCH, self.cache.take(start, count), *blocks
            )
            self.cache.put(start, written)

    def _open_weights(self) -> WeightSource:
        model = self.get_model()
        if model.description.format == SHARDED_STATE:
            return ShardedStateSource(model.description, model.dtype.name, model.tensor_shapes)
        offers = self.registry.offers("hardpoint_weight_loaders", self.platform.name)
        return open_weights(model.description, self.config.model.seed or 0, offers)

    def _abandon_waiting(self, plan: SchedulerOutput) -> None:
        """A step that waits for sampling may only be left behind if all its requests are gone."""
        step = self._waiting
        if step is None:
            return
        if alive := set(step.req_ids) - plan.finished:
            raise LifecycleError(
                f"step {step.plan.step_id} waits for sample_tokens (requests {sorted(alive)}); "
                f"step {plan.step_id} cannot run before it"
            )
        self._waiting = None

    def _missing(self, method: str, step: str) -> NoReturn:
        raise LifecycleError(f"{method} was called before {step}")


def _filled(blocks: Sequence[int]) -> np.ndarray:
    """Return one call's blocks, padded with the null block."""
    padded = np.zeros(CACHE_BATCH, np.int32)
    padded[: len(blocks)] = blocks
    return padded


def _unserved(plan: SchedulerOutput) -> Iterator[str]:
    """Yield what of a plan is no business of this runner."""
    if plan.drafts:
        yield "speculative decoding"
    for new in plan.new:
        for name in ("pooling", "lora", "prompt_adapter"):
            if getattr(new, name) is not None:
                yield f"{name} (request {new.req_id})"


def _copy_batches(
    copies: Sequence[tuple[int, int, int]],
) -> list[list[tuple[int, int]]]:
    batches: list[list[tuple[int, int]]] = []
    written: set[int] = set()
    for group, source, target in copies:
        if group != 0:
            raise MessageError(f"block copies of group {group}, and there is one group")
        full = not batches or len(batches[-1]) == CACHE_BATCH
        if full or source in written or target in written:
            batches.append([])
            written = set()
        batches[-1].append((source, target))
        written.add(target)
    return batches


def _described(context: WorkerContext) -> ModelDescription:
    if context.config.description is None:
        raise HardpointError(
            "the configuration has no model description; the engine reads it before it starts "
            "workers (hardpoint.checkpoints.read_description)"
        )
    return context.config.description
