"""TorchWorker: takes one rank's device, budgets its memory, and gives the steps to its runner."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hardpoint.capabilities import Capability, Support
from hardpoint.errors import ConfigError, LifecycleError, MemoryBudgetError, PluginError
from hardpoint.references import resolve_class
from hardpoint.worker import Worker

from hardpoint_runtime.collaborators import made
from hardpoint_runtime.device import DeviceOps, MemoryInfo, TorchDeviceOps
from hardpoint_runtime.loading.sharded_state import save_sharded_state
from hardpoint_runtime.model_runner import TorchModelRunner
from hardpoint_runtime.parallel.seat import ALONE, Seat, take_seat
from hardpoint_runtime.profiling import StepProfiler

if TYPE_CHECKING:
    from hardpoint.kv_cache import KVCacheConfig, KVCacheSpec
    from hardpoint.messages import (
        GrammarOutput,
        ModelRunnerOutput,
        SchedulerOutput,
        StepTicket,
    )
    from hardpoint.platform import Platform
    from hardpoint.records import LoadReport, SavedFile, WarmUpReport, WorkerContext
    from hardpoint.registry import Registry

_logger = logging.getLogger("hardpoint.worker")


class TorchWorker(Worker):
    """One rank on a torch device. Platforms subclass it to make their DeviceOps.

    After ``init_device``: ``device``, ``seat`` (what this rank holds of the model, and its peers),
    ``model_runner``, and ``budget``, the bytes that this rank may hold in all.
    """

    device: DeviceOps | None = None
    seat: Seat = ALONE
    model_runner: TorchModelRunner | None = None
    budget: int = 0

    def __init__(self, context: WorkerContext, platform: Platform, registry: Registry) -> None:
        super().__init__(context, platform, registry)
        self._collectives_ended = threading.Event()
        self.profiler: StepProfiler | None = None

    # Collaborators: override one to change a part.

    def make_device(self) -> DeviceOps:
        """Build the port to this rank's device, without touching it yet.

        Raises PluginError for a platform of whose name torch has no device: its worker builds
        another port, or imports what registers the device.
        """
        name = self.platform.name
        try:
            return TorchDeviceOps(name, self.device_index)
        except RuntimeError as error:
            raise PluginError(
                f"torch has no device {name!r} in this process. {type(self).__qualname__} must "
                "override make_device, or import the package that registers the device with torch"
            ) from error

    @property
    def device_index(self) -> int:
        """The number of this rank's device: the first that it owns; where the configuration names
        none, its place among the workers of this host. Raises ConfigError for an id that is none.
        """
        devices = self.context.devices
        if not devices:
            return self.context.local_rank
        if not devices[0].isdecimal():
            raise ConfigError(
                f"devices: {devices[0]!r} is not the number of a device of platform "
                f"{self.platform.name!r}"
            )
        return int(devices[0])

    def make_model_runner(self, device: DeviceOps) -> TorchModelRunner:
        """Build the runner of the class that the configuration or the platform names.

        The class takes (context, platform, registry, device).
        """
        runner_class = resolve_class(self.model_runner_class, TorchModelRunner)
        runner: TorchModelRunner = runner_class(self.context, self.platform, self.registry, device)
        runner.seat = self.seat
        return runner

    def join_group(self) -> None:
        """Join the groups of this rank, before memory is measured: collectives hold some.

        Called by ``init_device``; returns when all their members have joined.
        """
        self.seat = take_seat(self.context, self._device("join_group"), self._collectives_ended)

    # The life of a worker, in order.

    def init_device(self) -> None:
        """Take the device, seed it, and fix the memory budget.

        Raises ConfigError for a rank or dtype that cannot be, MemoryBudgetError for a budget that
        is not free.
        """
        self._check_rank()
        self._check_dtype()
        device = self.device = made(self.make_device)
        device.set_device()
        self.join_group()
        device.seed(self.config.model.seed or 0)
        self.budget = self._budget(device)
        self.model_runner = made(self.make_model_runner, device)

    def load_model(self) -> LoadReport:
        """Construct the model and load its weights."""
        report = self._runner("load_model").load_model()
        _logger.info(
            "rank %d: %d bytes of weights in %.2f s", self.rank, report.weight_bytes, report.seconds
        )
        return report

    def get_kv_cache_spec(self) -> Mapping[str, KVCacheSpec]:
        """Return layer name -> what the layer keeps per block."""
        return self._runner("get_kv_cache_spec").get_kv_cache_spec()

    def determine_available_memory(self) -> int:
        """Return the bytes left for the KV cache: the budget less the peak of a profiling run with
        the largest step; negative if the model alone is too large.
        """
        runner = self._runner("determine_available_memory")
        device = self._device("determine_available_memory")
        peak = device.peak_memory(runner.profile_run)
        available = self.budget - peak
        _logger.info(
            "rank %d: memory budget %d bytes, %d used at the peak, %d left for the KV cache",
            self.rank, self.budget, peak, available,
        )  # fmt: skip
        return available

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache and bind it to the layers."""
        self._runner("initialize_from_config").initialize_kv_cache(kv_cache_config)

    def compile_or_warm_up_model(self) -> WarmUpReport:
        """Warm up; draws and outputs afterwards are as if it had not run."""
        return self._runner("compile_or_warm_up_model").warm_up()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | StepTicket:
        """Run one step."""
        runner = self._runner("execute_model")
        runner.other_calls = self.other_calls
        try:
            if self.profiler is None:
                return runner.execute_model(scheduler_output)
            with self.profiler.step(scheduler_output):
                return runner.execute_model(scheduler_output)
        finally:
            runner.other_calls = None

    def sample_tokens(self, ticket: StepTicket, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Finish the step of ``ticket``."""
        return self._runner("sample_tokens").sample_tokens(ticket, grammar)

    def shutdown(self) -> None:
        """Drop everything that this rank holds."""
        if self.profiler is not None and self.profiler.active:
            self.profiler.stop()
        if self.model_runner is not None:
            self.model_runner.close()
        self.seat.close()
        self.model_runner = self.device = None
        super().shutdown()

    def end_collectives(self) -> None:
        """Have every wait in this rank's groups raise CollectiveEndedError, also while joining."""
        self._collectives_ended.set()
        self.seat.end()

    def get_model_runner(self) -> TorchModelRunner:
        """Return the runner; raises LifecycleError before ``init_device``."""
        return self._runner("get_model_runner")

    def profile(
        self,
        is_start: bool,
        prefix: str | None = None,
        delay_iterations: int = 0,
        max_iterations: int | None = None,
    ) -> None:
        """Start or stop recording this rank's steps into ``profile_folder``."""
        if self.profiler is None:
            device, folder = self._device("profile"), self.config.observability.profile_folder
            self.profiler = StepProfiler(device, folder, self.rank)
        if is_start:
            self.profiler.start(prefix, delay_iterations, max_iterations)
        else:
            self.profiler.stop()

    def supported_tasks(self) -> tuple[str, ...]:
        """Return what models do here: generate, and embed where the platform pools."""
        pools = self.platform.support(Capability.POOLING) is Support.YES
        return ("generate", "embed") if pools else ("generate",)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Adopt a length fitted by the driver; longer requests are refused from now on."""
        self._runner("update_max_model_len").update_max_model_len(max_model_len)

    def save_sharded_state(
        self, path: str, pattern: str | None, max_size: int | None
    ) -> Sequence[SavedFile]:
        """Write this rank's weights, as they are in memory, into folder ``path``."""
        model = self._runner("save_sharded_state").get_model()
        return save_sharded_state(model, self.context, Path(path), pattern, max_size)

    # Within.

    def _check_rank(self) -> None:
        context = self.context
        if not 0 <= context.rank < context.world_size:
            raise ConfigError(f"rank {context.rank} is not in a world of {context.world_size}")

    def _check_dtype(self) -> None:
        dtypes = self.platform.limits(self.config).dtypes
        if self.config.model.dtype not in dtypes:
            raise ConfigError(
                f"dtype = {self.config.model.dtype!r}: platform {self.platform.name!r} computes in "
                f"{', '.join(dtypes)}"
            )

    def _budget(self, device: DeviceOps) -> int:
        """Return the bytes this rank may hold: its share of the device, as far as it is free.

        A share that the user set and that is not free is an error; the default one is lowered to
        what is free, and that is logged.
        """
        share = self.config.cache.memory_utilization
        info = device.memory_info()
        if not (isinstance(info, MemoryInfo) and 0 <= info.free <= info.total):
            raise PluginError(
                f"{type(device).__qualname__}.memory_info returned {info!r}; it must be a "
                "MemoryInfo of which no more is free than there is"
            )
        wanted = math.ceil(info.total * share)
        possible = info.free + device.memory_allocated()
        if wanted <= possible:
            return wanted
        if self.config.is_explicit("memory_utilization"):
            raise MemoryBudgetError(
                f"memory_utilization = {share:g} of {info.total} bytes are {wanted} bytes, but "
                f"only {possible} are free for this worker; set it to at most "
                f"{math.floor(possible / info.total * 100) / 100:g}"
            )
        _logger.info(
            "rank %d: %d of %d bytes are free, fewer than memory_utilization = %g asks for (%d)",
            self.rank, possible, info.total, share, wanted,
        )  # fmt: skip
        return possible

    def _runner(self, method: str) -> TorchModelRunner:
        if self.model_runner is None:
            self._missing(method)
        return self.model_runner

    def _device(self, method: str) -> DeviceOps:
        if self.device is None:
            self._missing(method)
        return self.device

    def _missing(self, method: str) -> NoReturn:
        raise LifecycleError(f"{method} was called before init_device, or after shutdown")
