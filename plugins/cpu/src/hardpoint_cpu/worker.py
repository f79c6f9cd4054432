"""The cpu worker: binds itself to its cores, then does as every torch worker."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

import torch
from hardpoint.errors import UnsupportedError
from hardpoint_runtime.worker import TorchWorker

from hardpoint_cpu import threads
from hardpoint_cpu.device import CpuDeviceOps
from hardpoint_cpu.heap import large_blocks_mapped
from hardpoint_cpu.model_runner import CpuModelRunner

if TYPE_CHECKING:
    from hardpoint.records import LoadReport

    from hardpoint_cpu.platform import CpuPlatform
    from hardpoint_cpu.settings import CpuSettings

_logger = logging.getLogger("hardpoint.worker")

RESERVE = 64 << 20
"""Bytes left for the rest of the process (requests, texts, the driver where it shares it), which
grows a little after the KV cache was sized.
"""


class CpuWorker(TorchWorker):
    """One rank on its share of the host's cores."""

    def make_device(self) -> CpuDeviceOps:
        """Build the port to host memory, of which each worker may use its part."""
        options = self._options
        return CpuDeviceOps(
            self.context.world_size, options.collectives, native_level=options.native_level
        )

    def init_device(self) -> None:
        """Bind this thread and torch's to the rank's cores, then take the device."""
        self.bind_threads()
        super().init_device()

    def load_model(self) -> LoadReport:
        """Load the model. Raises UnsupportedError where ``batch_invariant`` is set and the runner
        is not one that refuses what no native program computes.
        """
        runner = self._runner("load_model")
        if self.config.model.batch_invariant and not isinstance(runner, CpuModelRunner):
            raise UnsupportedError("batch_invariant", f"the model runner {type(runner).__name__}")
        with large_blocks_mapped():
            return super().load_model()

    def bind_threads(self) -> None:
        """Keep to the rank's share of the cores, with as many threads as the settings say.

        The calling thread is the worker's own, and torch's threads are started by it, so nothing
        else of the process is bound.
        """
        options = self._options
        usable = threads.usable_cores(self.platform.root)  # type: ignore[attr-defined]
        cores = threads.chosen_cores(options, usable)
        workers = self.context.world_size
        if workers > 1:
            cores = cores.share(self.context.local_rank, workers)
        if cores.ids != usable.ids:
            threads.bind(cores.ids)
        count = threads.thread_count(options, cores)
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
        _logger.info("rank %d: %d threads on cores %s", self.rank, count, cores.ids)

    @property
    def _options(self) -> CpuSettings:
        return cast("CpuPlatform", self.platform).options

    def supported_tasks(self) -> tuple[str, ...]:
        """Return what models do here: no vectors, which come through torch, in a run that is batch
        invariant.
        """
        if self.config.model.batch_invariant:
            return ("generate",)
        return super().supported_tasks()

    def determine_available_memory(self) -> int:
        """Return what is left of the budget after a profiling run, less what a native program will
        take and a reserve.
        """
        runner = self._runner("determine_available_memory")
        program = runner.program_bytes() if isinstance(runner, CpuModelRunner) else 0
        return super().determine_available_memory() - program - RESERVE
