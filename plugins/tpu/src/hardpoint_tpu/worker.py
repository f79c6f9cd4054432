"""TpuWorker: takes the devices, budgets their memory, and gives the steps to its runner."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

import jax
from hardpoint.errors import LifecycleError, MemoryBudgetError
from hardpoint.records import LoadReport, SavedFile, SleepReport, WarmUpReport
from hardpoint.references import resolve_class
from hardpoint.worker import Worker

from hardpoint_tpu.devices import memory_limit, take_devices
from hardpoint_tpu.memory_estimate import temporary_bytes
from hardpoint_tpu.model_runner import TpuModelRunner
from hardpoint_tpu.platform import LABEL, UNTRIED
from hardpoint_tpu.reports import MemoryReport, ProgramReport
from hardpoint_tpu.sharded_state import write_sharded_state

if TYPE_CHECKING:
    from hardpoint.kv_cache import KVCacheConfig, KVCacheSpec
    from hardpoint.messages import GrammarOutput, ModelRunnerOutput, SchedulerOutput, StepTicket

    from hardpoint_tpu.platform import TpuPlatform

_logger = logging.getLogger("hardpoint.worker")


class TpuWorker(Worker):
    """The one worker, and all devices. After ``init_device``: ``devices``, ``limit`` in bytes."""

    devices: Sequence[jax.Device] = ()
    limit: int = 0
    _runner: TpuModelRunner | None = None

    @property
    def tpu(self) -> TpuPlatform:
        """The platform, typed."""
        return cast("TpuPlatform", self.platform)

    # The life of a worker, in order.

    def init_device(self) -> None:
        """Take the devices and build the runner. Raises ConfigError if there are not enough."""
        count = self.config.parallel.tensor_parallel_size
        chosen = self.context.devices or self.config.device.devices or ()
        self.devices = take_devices(self.tpu.options, count, chosen)
        share = self.config.cache.memory_utilization
        self.limit = memory_limit(self.tpu.options, self.devices, share)
        runner_class = resolve_class(self.model_runner_class, TpuModelRunner)
        self._runner = runner_class(self.context, self.platform, self.registry, self.devices)

    def load_model(self) -> LoadReport:
        """Read the weights. Raises MemoryBudgetError if they do not fit."""
        report = self.get_model_runner().load_model()
        if report.weight_bytes > self.limit:
            hint = "plugins.tpu.memory_bytes" if self.tpu.on_cpu else "tensor_parallel_size"
            raise MemoryBudgetError(
                f"the weights take {report.weight_bytes} bytes, and the devices may hold "
                f"{self.limit}: raise memory_utilization or {hint}"
            )
        return report

    def get_kv_cache_spec(self) -> Mapping[str, KVCacheSpec]:
        """Return the runner's specs."""
        return self.get_model_runner().get_kv_cache_spec()

    def determine_available_memory(self) -> int:
        """Return what is left beside the weights and the estimated work space of the programs."""
        runner = self.get_model_runner()
        block_size = next(iter(runner.get_kv_cache_spec().values())).block_size
        work = temporary_bytes(runner.shape, runner.buckets, block_size)
        return self.limit - runner.get_model().num_bytes - work

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache. Raises MemoryBudgetError for one that does not fit."""
        wanted = sum(tensor.num_bytes for tensor in kv_cache_config.tensors)
        held = self.get_model_runner().get_model().num_bytes
        if held + wanted > self.limit:
            raise MemoryBudgetError(
                f"a KV cache of {wanted} bytes does not fit: the devices may hold {self.limit}, "
                f"and the weights take {held}"
            )
        self.get_model_runner().initialize_kv_cache(kv_cache_config)

    def compile_or_warm_up_model(self) -> WarmUpReport:
        """Compile every program."""
        report = self.get_model_runner().warm_up()
        memory = self.memory_report()
        _logger.info(
            "rank %d: %d bytes of weights, %d of KV cache, %d of work space, limit %d; %s",
            self.rank, memory.weights, memory.kv_cache, memory.temporaries, memory.limit,
            memory.label,
        )  # fmt: skip
        return report

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | StepTicket:
        """Run one step."""
        return self.get_model_runner().execute_model(scheduler_output)

    def sample_tokens(self, ticket: StepTicket, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Finish the step of ``ticket``."""
        return self.get_model_runner().sample_tokens(ticket, grammar)

    def shutdown(self) -> None:
        """Give all memory of the devices back."""
        if self._runner is not None:
            self._runner.close()
        self._runner = None
        super().shutdown()

    def get_model_runner(self) -> TpuModelRunner:
        """Return the runner; raises LifecycleError before ``init_device``."""
        if self._runner is None:
            self._missing()
        return self._runner

    # Reports, by collective_rpc.

    def memory_report(self) -> MemoryReport:
        """Return who holds how much of the devices' memory."""
        runner = self.get_model_runner()
        programs = runner.programs
        return MemoryReport(
            limit=self.limit,
            weights=0 if runner.model is None else runner.model.num_bytes,
            kv_cache=0 if runner.cache is None else runner.cache.num_bytes,
            temporaries=0 if programs is None else programs.stages.temporary_bytes,
            backend=self.tpu.options.backend,
            label=LABEL if self.tpu.on_cpu else UNTRIED,
        )

    def program_report(self) -> ProgramReport:
        """Return what was traced and compiled so far."""
        runner = self.get_model_runner()
        stages = None if runner.programs is None else runner.programs.stages
        return ProgramReport(
            traces={} if stages is None else stages.traces,
            shapes={} if stages is None else stages.shapes,
            asked=runner.compilations.asked,
            cached=runner.compilations.cached,
        )

    # Services.

    def update_max_model_len(self, max_model_len: int) -> None:
        """Adopt a length fitted by the driver; longer requests are refused from now on."""
        self.get_model_runner().update_max_model_len(max_model_len)

    def sleep(self, level: int) -> SleepReport:
        """Level 1: copy the weights to the host and free the devices. Level 2: free them only."""
        return self._release(("weights", "kv_cache"), keep=level == 1)

    def discard(self, tags: Sequence[str]) -> SleepReport:
        """Free without a copy."""
        return self._release(tags, keep=False)

    def wake_up(self, tags: Sequence[str]) -> SleepReport:
        """Take the memory again: weights from the host's copy if any, the KV cache empty."""
        runner = self.get_model_runner()
        if "weights" in tags:
            runner.get_model().restore()
        if "kv_cache" in tags and runner.cache is not None:
            runner.cache.allocate()
        return SleepReport(
            bytes_freed=0, bytes_backed_up=0, bytes_still_held=self.memory_report().held
        )

    def reload_weights(self, path: str | None = None) -> LoadReport:
        """Read all weights again, in place; what is compiled stays good."""
        return self.get_model_runner().reload_weights(path)

    def save_sharded_state(
        self, path: str, pattern: str | None, max_size: int | None
    ) -> Sequence[SavedFile]:
        """Write the whole model, which is on this worker, in files of at most ``max_size``."""
        model = self.get_model_runner().get_model()
        return write_sharded_state(model, self.context, Path(path), pattern, max_size)

    def _release(self, tags: Sequence[str], *, keep: bool) -> SleepReport:
        runner = self.get_model_runner()
        before = self.memory_report().held
        kept = runner.get_model().release(keep=keep) if "weights" in tags else 0
        if "kv_cache" in tags and runner.cache is not None:
            runner.cache.release()
        held = self.memory_report().held
        return SleepReport(bytes_freed=before - held, bytes_backed_up=kept, bytes_still_held=held)

    def _missing(self) -> NoReturn:
        raise LifecycleError("the worker was used before init_device, or after shutdown")
