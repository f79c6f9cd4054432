"""The worker: owns the fake device, records every call, offers every service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from hardpoint.adapters import LoRARequest, PromptAdapterRequest
from hardpoint.errors import LifecycleError
from hardpoint.kv_cache import KVCacheConfig, KVCacheSpec
from hardpoint.messages import (
    DraftTokenIds,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
    StepTicket,
)
from hardpoint.records import LoadReport, SavedFile, SleepReport, WarmUpReport, WorkerContext
from hardpoint.references import resolve_class
from hardpoint.worker import Worker

from hardpoint_dummy.faults import FaultPoints, parse_faults
from hardpoint_dummy.memory import FakeMemory
from hardpoint_dummy.model_runner import DummyModelRunner
from hardpoint_dummy.pause import pause
from hardpoint_dummy.profiling import StepTrace
from hardpoint_dummy.recording import Recorder
from hardpoint_dummy.weight_files import write_weights

if TYPE_CHECKING:
    from hardpoint.platform import Platform
    from hardpoint.registry import Registry

    from hardpoint_dummy.settings import DummySettings

FOREVER = 3600.0


class DummyWorker(Worker):
    """One rank of the fake device."""

    def __init__(self, context: WorkerContext, platform: Platform, registry: Registry) -> None:
        super().__init__(context, platform, registry)
        self.options: DummySettings = platform.settings  # type: ignore[assignment]
        self.record = Recorder()
        self.faults = FaultPoints(
            parse_faults(self.options.fail_at),
            context.rank,
            hang=lambda: pause(FOREVER, context.cancelled),
            log=self.options.fault_log,
        )
        self.memory = FakeMemory(self.options.memory_bytes)
        self.trace = StepTrace(self.options.trace_folder, context.rank)
        self._runner: DummyModelRunner | None = None
        self.faults("build")

    # The life of a worker.

    def init_device(self) -> None:
        """Take the fake device."""
        self.record("init_device")
        self.faults("init_device")
        runner_class = resolve_class(self.model_runner_class, DummyModelRunner)
        self._runner = runner_class(self.context, self.platform, self.registry)

    def load_model(self) -> LoadReport:
        """Make the fake weights, as slowly as the settings say."""
        self.record("load_model")
        pause(self.options.load_seconds, self.context.cancelled)
        self.faults("load")
        report = self.get_model_runner().load_model()
        self.memory.allocate("weights", report.weight_bytes)
        return report

    def get_kv_cache_spec(self) -> Mapping[str, KVCacheSpec]:
        """Return the runner's specs."""
        self.record("get_kv_cache_spec")
        return self.get_model_runner().get_kv_cache_spec()

    def determine_available_memory(self) -> int:
        """Return what the fake device's memory leaves beside the weights."""
        self.record("determine_available_memory")
        return self.memory.free

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the fake cache; raises MemoryBudgetError if it does not fit."""
        self.record("initialize_from_config", kv_cache_config.num_blocks)
        num_bytes = sum(tensor.num_bytes for tensor in kv_cache_config.tensors)
        self.memory.allocate("kv_cache", num_bytes)
        self.get_model_runner().initialize_kv_cache(kv_cache_config)

    def compile_or_warm_up_model(self) -> WarmUpReport:
        """Warm up: nothing to do."""
        self.record("compile_or_warm_up_model")
        self.faults("warm_up")
        return self.get_model_runner().warm_up()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | StepTicket:
        """Run one step, as slowly as the settings say."""
        self.record("execute_model", scheduler_output.step_id)
        self.faults("step")
        if self.options.step_seconds:
            pause(self.options.step_seconds, self.context.cancelled)
        with self.trace.step(scheduler_output):
            return self.get_model_runner().execute_model(scheduler_output)

    def sample_tokens(self, ticket: StepTicket, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Finish a deferred step."""
        self.record("sample_tokens", ticket.step_id)
        self.faults("sample")
        return self.get_model_runner().sample_tokens(ticket, grammar)

    def shutdown(self) -> None:
        """Give the fake device back."""
        self.record("shutdown")
        self.faults("shutdown")
        self.trace.close()
        self.memory.clear()
        super().shutdown()

    def end_collectives(self) -> None:
        """Nothing to release: no rank of the fake device awaits another."""
        self.record("end_collectives")

    def get_model_runner(self) -> DummyModelRunner:
        """Return the runner; raises LifecycleError before ``init_device``."""
        if self._runner is None:
            raise LifecycleError("get_model_runner: call init_device first")
        return self._runner

    # What tests ask of it, by collective_rpc.

    def recorded_calls(self) -> tuple[tuple[str, object], ...]:
        """Return every call of this worker so far: its name, and what tells it apart or None."""
        return self.record.calls

    def passed_points(self) -> Mapping[str, int]:
        """Return how often each fault point was passed."""
        return dict(self.faults.passed)

    def known_requests(self) -> tuple[str, ...]:
        """Return the ids of the requests that this worker holds."""
        return tuple(self.get_model_runner().requests)

    # Services.

    def get_kv_cache_layouts(self) -> Sequence[str]:
        """Return the one layout of the fake cache."""
        self.record("get_kv_cache_layouts")
        return super().get_kv_cache_layouts()

    def get_cache_block_size_bytes(self) -> int:
        """Return the bytes of one block over all layers."""
        self.record("get_cache_block_size_bytes")
        return super().get_cache_block_size_bytes()

    def update_max_model_len(self, max_model_len: int) -> None:
        """Refuse longer requests from now on."""
        self.record("update_max_model_len", max_model_len)
        self.get_model_runner().max_model_len = max_model_len

    def supported_tasks(self) -> tuple[str, ...]:
        """Return both tasks."""
        self.record("supported_tasks")
        return ("generate", "embed")

    def execute_dummy_batch(self) -> None:
        """Take part in a step without requests."""
        self.record("execute_dummy_batch")

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return the last step's drafts, once."""
        self.record("take_draft_token_ids")
        return self.get_model_runner().take_drafts()

    def add_lora(self, request: LoRARequest) -> bool:
        """Load an adapter: its id and digest salt the cells of its requests."""
        self.record("add_lora", request.id)
        return self.get_model_runner().loras.add(request)

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter."""
        self.record("remove_lora", lora_id)
        return self.get_model_runner().loras.remove(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter."""
        self.record("pin_lora", lora_id)
        return self.get_model_runner().loras.pin(lora_id)

    def list_loras(self) -> frozenset[int]:
        """Return the loaded adapters."""
        self.record("list_loras")
        return self.get_model_runner().loras.ids()

    def add_prompt_adapter(self, request: PromptAdapterRequest) -> bool:
        """Load a soft prompt: it replaces the first positions of its requests."""
        self.record("add_prompt_adapter", request.id)
        return self.get_model_runner().prompt_adapters.add(request)

    def remove_prompt_adapter(self, prompt_adapter_id: int) -> bool:
        """Forget a soft prompt."""
        self.record("remove_prompt_adapter", prompt_adapter_id)
        return self.get_model_runner().prompt_adapters.remove(prompt_adapter_id)

    def pin_prompt_adapter(self, prompt_adapter_id: int) -> bool:
        """Keep a soft prompt."""
        self.record("pin_prompt_adapter", prompt_adapter_id)
        return self.get_model_runner().prompt_adapters.pin(prompt_adapter_id)

    def list_prompt_adapters(self) -> frozenset[int]:
        """Return the loaded soft prompts."""
        self.record("list_prompt_adapters")
        return self.get_model_runner().prompt_adapters.ids()

    def sleep(self, level: int) -> SleepReport:
        """Give memory back; the cache's contents are lost, at level 2 the weights' too."""
        self.record("sleep", level)
        self.get_model_runner().cache.clear()
        backed_up = {"weights"} if level == 1 else set()
        return self.memory.release(("weights", "kv_cache"), backed_up)

    def wake_up(self, tags: Sequence[str]) -> SleepReport:
        """Take memory back."""
        self.record("wake_up", tuple(tags))
        return self.memory.restore(tags)

    def discard(self, tags: Sequence[str]) -> SleepReport:
        """Give memory back without a backup."""
        self.record("discard", tuple(tags))
        if "kv_cache" in tags:
            self.get_model_runner().cache.clear()
        return self.memory.release(tags, set())

    def reload_weights(self, path: str | None = None) -> LoadReport:
        """Make the fake weights anew; another path gives another model."""
        self.record("reload_weights", path)
        self.faults("load")
        return self.get_model_runner().reload_weights(path)

    def save_sharded_state(
        self, path: str, pattern: str | None, max_size: int | None
    ) -> Sequence[SavedFile]:
        """Write the fake weights in parts of at most ``max_size`` bytes."""
        self.record("save_sharded_state", path)
        seed = self.get_model_runner().get_model().weights.to_bytes(8)
        weights = sha256(seed).digest() * (self.options.weight_bytes // 32 + 1)
        content = weights[: self.options.weight_bytes]
        return write_weights(Path(path), content, self.context, pattern, max_size)

    def profile(
        self,
        is_start: bool,
        prefix: str | None = None,
        delay_iterations: int = 0,
        max_iterations: int | None = None,
    ) -> None:
        """Start or stop writing a trace of the steps."""
        self.record("profile", is_start)
        if is_start:
            self.trace.start(prefix, delay_iterations, max_iterations)
        else:
            self.trace.close()

    def reset_prefix_cache(self) -> None:
        """Note it: this rank keeps nothing about prefixes."""
        self.record("reset_prefix_cache")

    def reset_mm_cache(self) -> None:
        """Note it: inputs are not processed before they are encoded."""
        self.record("reset_mm_cache")

    def reset_encoder_cache(self) -> None:
        """Forget encoded inputs."""
        self.record("reset_encoder_cache")
        self.get_model_runner().encoded.clear()
