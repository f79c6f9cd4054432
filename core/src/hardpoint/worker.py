"""The Worker contract: owns one rank's devices, in the worker's process (for ``uni``: on a thread
of the driver).

Methods are called by :class:`hardpoint.rpc.host.WorkerHost`, one at a time, in this order, which
the host enforces::

    init_device -> load_model -> get_kv_cache_spec, determine_available_memory
      -> initialize_from_config -> compile_or_warm_up_model
      -> (execute_model, sample_tokens)* -> shutdown

A worker needs no checks of its own for order, sleep state or capability: the host makes them, for
every plugin alike. The optional methods raise UnsupportedError here; a platform that declares the
capability overrides them. What a method raises reaches the driver as RemoteError, with the original
as its cause; it ends that call alone. All sizes are in bytes unless they say tokens or blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from hardpoint.capabilities import Capability
from hardpoint.errors import UnsupportedError
from hardpoint.kv_cache import KVCacheConfig, KVCacheSpec
from hardpoint.records import LoadReport, SavedFile, SleepReport, WarmUpReport, WorkerContext

if TYPE_CHECKING:
    from hardpoint.adapters import LoRARequest, PromptAdapterRequest
    from hardpoint.messages import (
        DraftTokenIds,
        GrammarOutput,
        ModelRunnerOutput,
        SchedulerOutput,
        StepTicket,
    )
    from hardpoint.model_runner import ModelRunner
    from hardpoint.platform import Platform
    from hardpoint.registry import Registry


class Worker(ABC):
    """One rank. Construction must not touch the device: ``init_device`` does.

    ``registry`` holds exactly the driver's resolved plugins, already loaded in this process.
    """

    other_calls: int | None = None
    """While ``execute_model`` runs: how many calls that were no ``execute_model`` this rank has had
    so far, as its host counts them; None where nobody does. If it is what it was in the step
    before, nothing but steps came between, and what was looked over then need not be again.
    """

    def __init__(self, context: WorkerContext, platform: Platform, registry: Registry) -> None:
        self.context = context
        self.config = context.config
        self.platform = platform
        self.registry = registry

    @property
    def rank(self) -> int:
        """This worker's rank in the world."""
        return self.context.rank

    @property
    def is_driver_worker(self) -> bool:
        """Whether this is the first rank of its tensor-parallel group."""
        return self.context.rank % self.config.parallel.tensor_parallel_size == 0

    @property
    def model_runner_class(self) -> str:
        """The reference of the ModelRunner class to build: the driver's choice, as its launcher
        handed it on. A worker that nobody launched asks its own registry.
        """
        chosen = self.context.model_runner
        return chosen or self.registry.model_runner_class(self.config, self.platform)

    # The life of a worker, in order.

    @abstractmethod
    def init_device(self) -> None:
        """Take the devices of this rank, set seeds and threads, join the process groups.

        The first call, at once on all ranks: they may wait for each other here. Raises ConfigError
        or MemoryBudgetError with the figures if the device cannot serve the configuration.
        """

    @abstractmethod
    def load_model(self) -> LoadReport:
        """Construct the model that ``config.description`` describes and load this rank's part of
        its weights, in ``config.model.dtype``.

        Once, after ``init_device``. With ``load_format = "dummy"`` weights are made up and no file
        is read. Raises CheckpointError naming file and tensor, UnsupportedModelError, and
        MemoryBudgetError.
        """

    @abstractmethod
    def get_kv_cache_spec(self) -> Mapping[str, KVCacheSpec]:
        """Return layer name -> what the layer keeps of each block, for the layers that live on this
        rank; empty if it has no attention. Any time after ``load_model``; no device work.
        """

    @abstractmethod
    def determine_available_memory(self) -> int:
        """Return the bytes that may be used for the KV cache on this rank: what
        ``memory_utilization`` of the memory leaves beside the weights and the work space of the
        largest step. Negative if those alone are too large: the driver says so.

        After ``load_model``, before the cache is there; not called where the size is configured.
        May run the model; that leaves no trace.
        """

    @abstractmethod
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache that this rank's plan describes and bind it to the layers.

        Once; the host picks the plan of this rank. Block 0 is the null block, which no request
        owns. Raises MemoryBudgetError with the bytes that were wanted and had.
        """

    @abstractmethod
    def compile_or_warm_up_model(self) -> WarmUpReport:
        """Compile, capture, warm up, and say how many seconds that took. Draws and outputs
        afterwards are as if it had not run.

        After the cache is there; may be called again. Ask ``context.cancelled()`` between long
        parts, and raise CancelledStepError if it is true.
        """

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | StepTicket:
        """Run one step; return its output, or a ticket if ``defer_sampling`` is set. Never None.

        Called on every rank for each step, in the order of ``step_id``. The output must be of that
        step. Only the output rank's counts (``Placement.output_rank``); another may return one
        without tokens. Raises MessageError for a plan that contradicts itself, CancelledStepError
        where ``context.cancelled()`` turned true, and whatever failed: never an empty output
        instead.
        """

    @abstractmethod
    def sample_tokens(self, ticket: StepTicket, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Finish the step of ``ticket``, whose logits are kept since ``execute_model``; ``grammar``
        has the masks of its structured requests, None where there is none after all.
        """

    def shutdown(self) -> None:
        """Give everything back. Called once, also after a failed step or a failed start; call
        super() last.
        """
        return

    def end_collectives(self) -> None:
        """Release this rank, and its peers where they can be reached, from exchanges that will
        never be complete: a peer has failed or is gone.

        Called by the process that hosts the worker, at any stage before ``shutdown`` and **from
        another thread** than the one that makes all other calls; must return at once. The work in
        progress then raises.
        """
        return

    @abstractmethod
    def get_model_runner(self) -> ModelRunner:
        """Return the model runner (for worker methods registered by plugins, and for
        ``apply_model``).
        """

    def get_model(self) -> object:
        """Return the model object, whatever it is on this platform."""
        return self.get_model_runner().get_model()

    # Optional services. Each is offered only if the platform declares the capability.

    def get_kv_cache_layouts(self) -> Sequence[str]:
        """Return the KV cache layouts this worker can use, preferred first."""
        return ("NHD",)

    def get_cache_block_size_bytes(self) -> int:
        """Return the bytes of one block over all layers of this rank."""
        return sum(spec.page_bytes for spec in self.get_kv_cache_spec().values())

    def update_max_model_len(self, max_model_len: int) -> None:
        """Adopt a length in tokens, fitted by the driver to the KV cache; no longer request comes
        from now on. Once, between ``load_model`` and the allocation of the cache.
        """
        self._unsupported(Capability.CHUNKED_PREFILL)

    def supported_tasks(self) -> tuple[str, ...]:
        """Return what the loaded model can do: ``generate``, ``embed``."""
        return ("generate",)

    def execute_dummy_batch(self) -> None:
        """Run one inert decode, so that this rank takes part in its peers' collectives."""
        self._unsupported(Capability.DATA_PARALLEL)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return the drafts proposed after the last step, once; None where there are none."""
        self._unsupported(Capability.SPECULATIVE)

    def add_lora(self, request: LoRARequest) -> bool:
        """Load an adapter; True when it is usable on this rank.

        All ranks must answer alike, or the driver raises DivergedError. Raises CheckpointError for
        files that are not an adapter of this model.
        """
        self._unsupported(Capability.LORA)

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; False if it is unknown."""
        self._unsupported(Capability.LORA)

    def pin_lora(self, lora_id: int) -> bool:
        """Never evict this adapter."""
        self._unsupported(Capability.LORA)

    def list_loras(self) -> frozenset[int]:
        """Return the ids loaded on this rank."""
        self._unsupported(Capability.LORA)

    def add_prompt_adapter(self, request: PromptAdapterRequest) -> bool:
        """Load a soft prompt; True when it is usable on this rank."""
        self._unsupported(Capability.PROMPT_ADAPTERS)

    def remove_prompt_adapter(self, prompt_adapter_id: int) -> bool:
        """Forget a soft prompt; False if it is unknown."""
        self._unsupported(Capability.PROMPT_ADAPTERS)

    def pin_prompt_adapter(self, prompt_adapter_id: int) -> bool:
        """Never evict this soft prompt."""
        self._unsupported(Capability.PROMPT_ADAPTERS)

    def list_prompt_adapters(self) -> frozenset[int]:
        """Return the soft prompts loaded on this rank."""
        self._unsupported(Capability.PROMPT_ADAPTERS)

    def sleep(self, level: int) -> SleepReport:
        """Level 1: keep weights on the host, drop the KV cache. Level 2: drop both, keep module
        buffers. Return what that freed and moved.

        No step runs meanwhile, and none comes before everything is awake again.
        """
        self._unsupported(Capability.SLEEP)

    def wake_up(self, tags: Sequence[str]) -> SleepReport:
        """Bring the named tags (``weights``, ``kv_cache``), which sleep, back. Weights that level 2
        dropped are undefined until ``reload_weights``.
        """
        self._unsupported(Capability.SLEEP)

    def discard(self, tags: Sequence[str]) -> SleepReport:
        """Free the named tags without a backup, and return what that freed."""
        self._unsupported(Capability.SLEEP)

    def reload_weights(self, path: str | None = None) -> LoadReport:
        """Load all weights again, in place, from ``path`` or from where they came. Raises
        CheckpointError naming file and tensor.
        """
        self._unsupported(Capability.WEIGHT_RELOAD)

    def save_sharded_state(
        self, path: str, pattern: str | None, max_size: int | None
    ) -> Sequence[SavedFile]:
        """Write this rank's weights as files of at most ``max_size`` bytes (None: any) into the
        folder ``path``, which exists, under names by ``pattern``; return them with their digests.
        """
        self._unsupported(Capability.SHARDED_STATE)

    def profile(
        self,
        is_start: bool,
        prefix: str | None = None,
        delay_iterations: int = 0,
        max_iterations: int | None = None,
    ) -> None:
        """Start or stop tracing this rank: pass over ``delay_iterations`` steps, record at most
        ``max_iterations`` (None: all), and write a file named ``prefix`` and the rank into
        ``config.observability.profile_folder``.
        """
        self._unsupported(Capability.PROFILE)

    def reset_prefix_cache(self) -> None:
        """Forget what this rank keeps about cached prefixes (the block pool itself is the
        driver's).
        """
        return

    def reset_mm_cache(self) -> None:
        """Forget processed multimodal inputs."""
        self._unsupported(Capability.MULTIMODAL)

    def reset_encoder_cache(self) -> None:
        """Forget encoder outputs."""
        self._unsupported(Capability.MULTIMODAL)

    def _unsupported(self, capability: Capability) -> NoReturn:
        raise UnsupportedError(capability.value, f"platform {self.platform.name!r}")
