"""Every service of the Executor beside the step: each written once, over ``collective_rpc``, for
all backends.

What a platform does not offer raises UnsupportedError naming the capability before anything is
sent.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from hardpoint.capabilities import Capability
from hardpoint.errors import ConfigError, HardpointError, UnsupportedError
from hardpoint.records import Problem
from hardpoint.service_arguments import check_max_size, check_pattern, check_profile
from hardpoint.sleep import SleepState, check_tags

if TYPE_CHECKING:
    from hardpoint.adapters import LoRARequest, PromptAdapterRequest
    from hardpoint.aggregation import ECOutputAggregator, KVOutputAggregator
    from hardpoint.config import Config
    from hardpoint.kv_cache import KVCacheConfig, KVCacheSpec
    from hardpoint.messages import DraftTokenIds
    from hardpoint.platform import Platform
    from hardpoint.records import LoadReport, Placement, SavedFile, SleepReport, WarmUpReport
    from hardpoint.registry import Registry


class DivergedError(HardpointError):
    """Ranks that must agree do not; the message has each rank's answer.

    What to do: call again; if it stays, shut down and start anew: the ranks are no longer alike.
    """


class WorkerCalls(ABC):
    """The Executor's services; subclassed by Executor only.

    Called in the driver by the engine, or by who holds an executor. Each waits for every rank and
    raises what ``collective_rpc`` raises: RemoteError of the first rank that failed,
    ExecutorFailedError.
    """

    plans_alike: ClassVar[bool] = False
    """Whether other processes plan the same steps, so that time may have no part in plans."""
    config: Config
    platform: Platform
    registry: Registry
    placement: Placement
    logger: logging.Logger

    def __init__(self) -> None:
        self.sleep_state = SleepState()
        self.kv_output_aggregator: KVOutputAggregator | None = None
        self.ec_output_aggregator: ECOutputAggregator | None = None
        self.warm_up_report: WarmUpReport | None = None
        self._tasks: tuple[str, ...] | None = None

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return self.placement.num_workers

    @property
    def output_rank(self) -> int:
        """The rank whose step results count."""
        return self.placement.output_rank

    @abstractmethod
    def collective_rpc(self, method: str, *, args: Any = (), reply_rank: int | None = None) -> Any:
        """Call every worker; see :meth:`hardpoint.executor.Executor.collective_rpc`."""

    @classmethod
    def tells_results(cls, config: Config) -> bool:
        """Whether this process says what comes out. Where several processes run one program, and
        each has an executor, one of them does.
        """
        return True

    def draw_seed(self) -> int:
        """Return the seed of an engine to which none was configured, the same in every process that
        plans this executor's steps.
        """
        return int.from_bytes(os.urandom(7), "big")

    def _agreed(self, method: str, *args: Any) -> Any:
        answers = self.collective_rpc(method, args=args)
        if any(answer != answers[0] for answer in answers):
            by_rank = ", ".join(f"rank {rank}: {answer!r}" for rank, answer in enumerate(answers))
            raise DivergedError(f"ranks disagree on {method}: {by_rank}")
        return answers[0]

    # Memory and the KV cache.

    def get_kv_cache_specs(self) -> list[Mapping[str, KVCacheSpec]]:
        """Return, per rank, layer name -> what the layer keeps per block."""
        specs: list[Mapping[str, KVCacheSpec]] = self.collective_rpc("get_kv_cache_spec")
        return specs

    def get_kv_cache_layout(self) -> str:
        """Return the first layout preferred by rank 0 that every rank can use; raise ConfigError if
        there is none.
        """
        offers: list[Sequence[str]] = self.collective_rpc("get_kv_cache_layouts")
        for layout in offers[0]:
            if all(layout in offer for offer in offers):
                return layout
        raise ConfigError(f"the workers share no KV cache layout: {offers}")

    def determine_available_memory(self) -> list[int]:
        """Return, per rank, the bytes that the KV cache may use (negative: the model alone is too
        large).
        """
        available: list[int] = self.collective_rpc("determine_available_memory")
        return available

    def determine_num_available_blocks(self) -> tuple[int, int]:
        """Return (device blocks, host blocks): the least over ranks, never negative. Host blocks
        are for swapping: 0.
        """
        available = self.determine_available_memory()
        sizes: list[int] = self.collective_rpc("get_cache_block_size_bytes")
        fitting = [
            max(0, room // size) for room, size in zip(available, sizes, strict=True) if size
        ]
        return min(fitting, default=0), 0  # no rank has attention: no blocks

    def initialize_from_config(self, kv_cache_configs: Sequence[KVCacheConfig]) -> None:
        """Give each rank its own KV cache plan (index = rank); all have as many blocks."""
        if len(kv_cache_configs) != self.world_size:
            raise ConfigError(
                f"{len(kv_cache_configs)} KV cache plans for {self.world_size} workers"
            )
        if len({plan.num_blocks for plan in kv_cache_configs}) != 1:
            raise ConfigError(
                f"ranks would differ in KV blocks: {[plan.num_blocks for plan in kv_cache_configs]}"
            )
        self.collective_rpc("initialize_from_config", args=(tuple(kv_cache_configs),))

    def compile_or_warm_up_model(self) -> WarmUpReport:
        """Warm every rank up; return the slowest's report."""
        reports: list[WarmUpReport] = self.collective_rpc("compile_or_warm_up_model")
        slowest = max(reports, key=lambda report: report.language_s + report.encoder_s)
        self.warm_up_report = slowest
        return slowest

    def initialize_cache(self, kv_cache_configs: Sequence[KVCacheConfig]) -> WarmUpReport:
        """Allocate the caches and warm up; log how many requests of full length fit at once.

        Raises ConfigError if not even one fits.
        """
        plan = kv_cache_configs[0]
        reserved = self.platform.limits(self.config).reserved_blocks
        tokens = max(0, plan.num_blocks - reserved) * plan.block_size
        length = self.config.model.max_model_len
        if length is not None:
            if tokens < length:
                problem = Problem(
                    key="max_model_len",
                    value=length,
                    message=f"the KV cache of {plan.num_blocks} blocks holds {tokens} tokens",
                    way_out="Lower it, or give the KV cache more blocks or memory.",
                )
                raise ConfigError(str(problem), problems=(problem,))
            self.logger.info(
                "KV cache on %s: %d blocks, %d tokens, %.2f requests of %d tokens at once",
                self.platform.name, plan.num_blocks, tokens, tokens / length, length,
            )  # fmt: skip
        self.initialize_from_config(kv_cache_configs)
        return self.compile_or_warm_up_model()

    def update_max_model_len(self, max_model_len: int) -> None:
        """Have every rank adopt the length that the driver fitted."""
        self.collective_rpc("update_max_model_len", args=(max_model_len,))

    def reset_prefix_cache(self) -> None:
        """Have every rank forget what it keeps about cached prefixes."""
        self.collective_rpc("reset_prefix_cache")

    def reset_mm_cache(self) -> None:
        """Have every rank forget processed multimodal inputs."""
        self.platform.require(Capability.MULTIMODAL)
        self.collective_rpc("reset_mm_cache")

    def reset_encoder_cache(self) -> None:
        """Have every rank forget encoder outputs."""
        self.platform.require(Capability.MULTIMODAL)
        self.collective_rpc("reset_encoder_cache")

    # The model.

    def supported_tasks(self) -> tuple[str, ...]:
        """Return what the loaded model can do; asked once."""
        if self._tasks is None:
            self._tasks = self.collective_rpc("supported_tasks", reply_rank=0)
        return self._tasks

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        """Run ``function(model)`` in every worker; return its values in rank order."""
        results: list[Any] = self.collective_rpc("apply_model", args=(function,))
        return results

    def reload_weights(self, path: str | None = None) -> list[LoadReport]:
        """Load all weights again, in place."""
        self.platform.require(Capability.WEIGHT_RELOAD)
        self.sleep_state.begin_reload()
        reports: list[LoadReport] = self.collective_rpc("reload_weights", args=(path,))
        self.sleep_state.reloaded()
        return reports

    def save_sharded_state(
        self, path: str, pattern: str | None = None, max_size: int | None = None
    ) -> list[Sequence[SavedFile]]:
        """Have every rank write its weights into the folder ``path``, and a manifest with them;
        return the files written, per rank. They are there when all are whole; what was saved there
        before is replaced then. Load it with ``load_format = "sharded_state"`` and the same sizes.

        ``pattern`` is a file name with the fields ``{part}`` and ``{rank}`` (or ``{tp}`` and
        ``{pp}``); ``max_size`` is the most bytes of a file, but for a tensor that is larger by
        itself. Raises InvalidRequestError, before anything is sent, for a pattern by which two
        files would have one name, and SleepStateError while the weights are not in memory.
        """
        from hardpoint.checkpoints.saving import Saving
        from hardpoint.checkpoints.sharded_state import manifest_of

        self.platform.require(Capability.SHARDED_STATE)
        check_pattern(pattern, self.config.parallel, self.world_size)
        check_max_size(max_size)
        self.sleep_state.require_weights("save_sharded_state")
        with Saving(path) as saving:
            files: list[Sequence[SavedFile]] = self.collective_rpc(
                "save_sharded_state", args=(str(saving.place), pattern, max_size)
            )
            used = (*self.registry.used("platform"), *self.registry.used("extension"))
            saving.commit(manifest_of(self.config, files, used))
        return files

    def execute_dummy_batch(self) -> None:
        """Run one inert decode on every rank, so that collectives of data-parallel peers match."""
        self.platform.require(Capability.DATA_PARALLEL)
        self.collective_rpc("execute_dummy_batch")

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return the drafts proposed after the last step."""
        self.platform.require(Capability.SPECULATIVE)
        drafts: DraftTokenIds | None = self.collective_rpc(
            "take_draft_token_ids", reply_rank=self.output_rank
        )
        return drafts

    def reinitialize_distributed(self, request: object) -> None:
        """Change the number of workers while running: no executor here can; raises
        UnsupportedError.
        """
        raise UnsupportedError(
            "a change of its number of workers",
            f"executor {type(self).__name__}",
            hint="Start a new one.",
        )

    def stop_remote_worker_execution_loop(self) -> None:  # noqa: B027 - a default, not a slot
        """Do nothing: no executor here keeps workers in a resident loop (the older API's mixin
        does).
        """

    async def stop_remote_worker_execution_loop_async(self) -> None:  # noqa: B027
        """Do nothing, as :meth:`stop_remote_worker_execution_loop`."""

    # Profiling.

    def profile(
        self,
        is_start: bool,
        prefix: str | None = None,
        delay_iterations: int = 0,
        max_iterations: int | None = None,
    ) -> None:
        """Start or stop tracing on every rank; files are named ``prefix`` plus the rank.

        ``delay_iterations`` steps are passed over first, ``max_iterations`` (None: all) recorded.
        Raises InvalidRequestError for a value that makes no sense, before anything is sent.
        """
        self.platform.require(Capability.PROFILE)
        check_profile(prefix, delay_iterations, max_iterations)
        self.collective_rpc("profile", args=(is_start, prefix, delay_iterations, max_iterations))

    def start_profile(self, prefix: str | None = None) -> None:
        """Start tracing on every rank."""
        self.profile(True, prefix)

    def stop_profile(self) -> None:
        """Stop tracing on every rank."""
        self.profile(False)

    # Adapters.

    def add_lora(self, request: LoRARequest) -> bool:
        """Load an adapter on every rank; True when all have it."""
        self.platform.require(Capability.LORA)
        return bool(self._agreed("add_lora", request))

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter on every rank; False if it is unknown."""
        self.platform.require(Capability.LORA)
        return bool(self._agreed("remove_lora", lora_id))

    def pin_lora(self, lora_id: int) -> bool:
        """Never evict this adapter."""
        self.platform.require(Capability.LORA)
        return bool(self._agreed("pin_lora", lora_id))

    def list_loras(self) -> frozenset[int]:
        """Return the ids loaded, equal on every rank; raise DivergedError naming ranks if not."""
        self.platform.require(Capability.LORA)
        return frozenset(self._agreed("list_loras"))

    def add_prompt_adapter(self, request: PromptAdapterRequest) -> bool:
        """Load a soft prompt on every rank; True when all have it."""
        self.platform.require(Capability.PROMPT_ADAPTERS)
        return bool(self._agreed("add_prompt_adapter", request))

    def remove_prompt_adapter(self, prompt_adapter_id: int) -> bool:
        """Forget a soft prompt on every rank; False if it is unknown."""
        self.platform.require(Capability.PROMPT_ADAPTERS)
        return bool(self._agreed("remove_prompt_adapter", prompt_adapter_id))

    def pin_prompt_adapter(self, prompt_adapter_id: int) -> bool:
        """Never evict this soft prompt."""
        self.platform.require(Capability.PROMPT_ADAPTERS)
        return bool(self._agreed("pin_prompt_adapter", prompt_adapter_id))

    def list_prompt_adapters(self) -> frozenset[int]:
        """Return the soft prompts loaded, equal on every rank."""
        self.platform.require(Capability.PROMPT_ADAPTERS)
        return frozenset(self._agreed("list_prompt_adapters"))

    # Sleep and wake.

    @property
    def is_sleeping(self) -> bool:
        """Whether any tag sleeps."""
        return self.sleep_state.is_sleeping

    @property
    def sleeping_tags(self) -> frozenset[str]:
        """Which tags sleep."""
        return self.sleep_state.sleeping_tags

    def sleep(self, level: int = 1) -> list[SleepReport]:
        """Give memory back. Level 1 keeps weights on the host and drops the KV cache; level 2 drops
        both. Raises SleepStateError if something sleeps already, but not all of it as deeply.
        """
        self.platform.require(Capability.SLEEP)
        if self.sleep_state.has_slept(level):
            self.logger.warning("already asleep: %s", ", ".join(sorted(self.sleeping_tags)))
            return []
        reports = self._move("sleep", check_tags(None), level, weights_dropped=level == 2)
        self.sleep_state.slept(level)
        return reports

    def wake_up(self, tags: Sequence[str] | None = None) -> list[SleepReport]:
        """Bring tags back (None: all). Waking what is awake changes nothing; unknown or empty tags
        are ValueError.
        """
        self.platform.require(Capability.SLEEP)
        chosen = tuple(tag for tag in check_tags(tags) if tag in self.sleeping_tags)
        if not chosen:
            self.logger.warning("nothing to wake: %s not asleep", ", ".join(check_tags(tags)))
            return []
        reports = self._move("wake_up", chosen, chosen)
        self.sleep_state.woke(chosen)
        return reports

    def discard(self, tags: Sequence[str]) -> list[SleepReport]:
        """Free tags without a backup."""
        self.platform.require(Capability.SLEEP)
        chosen = check_tags(tags)
        reports = self._move("discard", chosen, chosen, weights_dropped="weights" in chosen)
        self.sleep_state.discarded(chosen)
        return reports

    def _move(
        self, method: str, tags: Sequence[str], *args: Any, weights_dropped: bool = False
    ) -> list[SleepReport]:
        # Until every rank has answered, nobody knows what is resident where.
        self.sleep_state.partial(tags, weights_dropped=weights_dropped)
        reports: list[SleepReport] = self.collective_rpc(method, args=args)
        return reports
