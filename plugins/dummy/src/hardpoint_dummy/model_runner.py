"""The runner: keeps the requests, fills the fake cache, runs the fake model, samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import frozen
from hardpoint.adapters import LoRARequest, PromptAdapterRequest
from hardpoint.errors import LifecycleError
from hardpoint.kv_cache import KVCacheConfig, KVCacheSpec
from hardpoint.messages import (
    DraftTokenIds,
    GrammarOutput,
    GraphStats,
    MessageError,
    ModelRunnerOutput,
    SchedulerOutput,
    StepTicket,
)
from hardpoint.model_runner import ModelRunner
from hardpoint.records import LoadReport, WarmUpReport, WorkerContext

from hardpoint_dummy.adapters import AdapterSlots
from hardpoint_dummy.cache import FakeCache
from hardpoint_dummy.model import FakeModel, bytes_content, seed_of
from hardpoint_dummy.requests import RequestState, RequestTable
from hardpoint_dummy.rows import RowSampler
from hardpoint_dummy.transfers import Transfers

if TYPE_CHECKING:
    from hardpoint.platform import Platform
    from hardpoint.registry import Registry

    from hardpoint_dummy.settings import DummySettings

DEFAULT_VOCABULARY = 256


@frozen
class Computed:
    """Phase one of a step: its plan, and the scheduled requests that are to be sampled."""

    step: SchedulerOutput
    order: tuple[RequestState, ...]
    due: frozenset[str]


class DummyModelRunner(ModelRunner):
    """Executes steps with :class:`FakeModel`. Constructed as workers are."""

    def __init__(self, context: WorkerContext, platform: Platform, registry: Registry) -> None:
        self.config = config = context.config
        self.context = context
        self.options: DummySettings = platform.settings  # type: ignore[assignment]
        self.requests = RequestTable(trim=not config.scheduler.async_scheduling)
        self.loras: AdapterSlots[LoRARequest] = AdapterSlots(
            config.lora.max_loras, "LoRA adapter", "max_loras"
        )
        self.prompt_adapters: AdapterSlots[PromptAdapterRequest] = AdapterSlots(
            config.prompt_adapter.max_prompt_adapters, "prompt adapter", "max_prompt_adapters"
        )
        self.transfers = Transfers(context.rank, self.options.transfer_steps)
        self.encoded: dict[bytes, int] = {}
        self.max_model_len = config.model.max_model_len
        self._model: FakeModel | None = None
        self._cache: FakeCache | None = None
        self._waiting: dict[int, Computed] = {}
        self._drafts: DraftTokenIds | None = None

    # The model.

    def load_model(self) -> LoadReport:
        """Make the fake weights from the model's path and name of architecture."""
        return self.reload_weights(None)

    def reload_weights(self, path: str | None) -> LoadReport:
        """Make the fake weights from ``path``, or from where they came."""
        description = self.config.description
        source = path or (str(description.path) if description else "dummy")
        vocabulary = description.vocab_size if description else DEFAULT_VOCABULARY
        self._model = FakeModel(seed_of("weights", source), vocabulary)
        return LoadReport(weight_bytes=self.options.weight_bytes, seconds=self.options.load_seconds)

    def get_model(self) -> FakeModel:
        """Return the fake model; raises LifecycleError before it is loaded."""
        if self._model is None:
            raise LifecycleError("get_model: call load_model first")
        return self._model

    # The cache.

    @property
    def cache(self) -> FakeCache:
        """The fake cache; raises LifecycleError before it is allocated."""
        if self._cache is None:
            raise LifecycleError("the KV cache: call initialize_from_config first")
        return self._cache

    def get_kv_cache_spec(self) -> Mapping[str, KVCacheSpec]:
        """Return one full-attention spec for each layer of the description."""
        description, cache = self.config.description, self.config.cache
        layers = description.num_layers if description else 2
        head_size = description.head_size if description else 16
        dtype = cache.kv_cache_dtype if cache.kv_cache_dtype != "auto" else self.config.model.dtype
        spec = KVCacheSpec(
            block_size=cache.block_size or self.options.block_sizes[0],
            num_kv_heads=description.num_kv_heads if description else 2,
            head_size_k=head_size,
            head_size_v=head_size,
            dtype=dtype if dtype != "auto" else "float32",
        )
        return {f"layers.{index}": spec for index in range(layers)}

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Make an empty cache of the planned number of blocks."""
        sizes = [group.spec.block_size for group in kv_cache_config.groups]
        self._cache = FakeCache(kv_cache_config.num_blocks, sizes)

    def warm_up(self) -> WarmUpReport:
        """Do nothing: there is nothing to prepare."""
        return WarmUpReport(language_s=0.0)

    # Steps.

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | StepTicket:
        """Run one step; sample at once unless it is deferred."""
        computed = self._compute(scheduler_output)
        if scheduler_output.defer_sampling:
            self._waiting[scheduler_output.step_id] = computed
            return StepTicket(
                step_id=scheduler_output.step_id, generation=scheduler_output.generation
            )
        return self._sample(computed, None)

    def sample_tokens(self, ticket: StepTicket, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample the step of ``ticket``."""
        computed = self._waiting.pop(ticket.step_id, None)
        if computed is None:
            raise LifecycleError(f"step {ticket.step_id} does not wait for sampling here")
        return self._sample(computed, grammar)

    def take_drafts(self) -> DraftTokenIds | None:
        """Return the drafts proposed after the last step, once."""
        drafts, self._drafts = self._drafts, None
        return drafts

    def salt(self, state: RequestState) -> int:
        """Return what stands for the request's adapters in its cells; raise InvalidRequestError if
        one is not loaded.
        """
        if state.lora is None:
            return 0
        lora = self.loras.use(state.lora.id)
        return seed_of("lora", lora.id, lora.digest)

    def _compute(self, step: SchedulerOutput) -> Computed:
        scheduled = self.requests.apply(step)
        for block in step.blocks_to_zero:
            self.cache.zero(block)
        for group, source, destination in step.block_copies:
            self.cache.copy(group, source, destination)
        due = set()
        for state in scheduled:
            drafts = step.drafts.get(state.req_id, ())
            if self._forward(state, step.num_tokens[state.req_id], drafts):
                due.add(state.req_id)
        return Computed(step, tuple(scheduled), frozenset(due))

    def _forward(self, state: RequestState, count: int, drafts: Sequence[int]) -> bool:
        """Write the cells of ``count`` positions; return whether the request is to be sampled."""
        start, end = state.num_computed, state.num_computed + count
        known = [*state.tokens, *drafts]
        if end > len(known) or (drafts and end != len(known)):
            raise MessageError(
                f"request {state.req_id}: positions [{start}, {end}) are to be computed, but it "
                f"has {len(state.tokens)} tokens and {len(drafts)} drafts"
            )
        if self.max_model_len is not None and end > self.max_model_len:
            raise MessageError(
                f"request {state.req_id}: position {end - 1} is beyond max_model_len = "
                f"{self.max_model_len}"
            )
        cache, model, salt = self.cache, self.get_model(), self.salt(state)
        cache.check_table(state.req_id, state.blocks, end)
        replaced = self._replaced(state)
        cell = cache.read(state.blocks, start - 1) if start else None
        for position in range(start, end):
            content = replaced.get(position, known[position])
            cell = model.cell(cell, content, salt)
            cache.write(state.blocks, position, cell)
        state.num_computed = end
        return end >= len(state.tokens)

    def _replaced(self, state: RequestState) -> dict[int, int]:
        """Return position -> content where it is not the token: soft prompts and other inputs."""
        replaced: dict[int, int] = {}
        if state.prompt_adapter is not None:
            adapter = self.prompt_adapters.use(state.prompt_adapter.id)
            for position in range(adapter.num_virtual_tokens):
                replaced[position] = seed_of("prompt", adapter.id, adapter.digest, position)
        for position, data in state.extra.inputs:
            if data not in self.encoded:
                self.encoded[data] = bytes_content(data)
            replaced[position] = self.encoded[data]
        return replaced

    def _sample(self, computed: Computed, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        step = computed.step
        rows = RowSampler(self, step, grammar)
        tokens = tuple(
            rows.sample(state) if state.req_id in computed.due else () for state in computed.order
        )
        if rows.drafts:
            self._drafts = DraftTokenIds(
                req_ids=tuple(rows.drafts), drafts=tuple(rows.drafts.values())
            )
        kv, ec = self.transfers.advance(step)
        padded = 1 << max(0, step.total_tokens - 1).bit_length()
        return ModelRunnerOutput(
            step_id=step.step_id,
            generation=step.generation,
            req_ids=tuple(state.req_id for state in computed.order),
            tokens=tokens,
            logprobs=rows.logprobs,
            prompt_logprobs=rows.prompt_logprobs,
            pooled=rows.pooled,
            drafts=rows.drafts,
            nan_counts=rows.unwritten,
            kv=kv,
            ec=ec,
            graph_stats=GraphStats(unpadded=step.total_tokens, padded=padded, mode="fake"),
        )
