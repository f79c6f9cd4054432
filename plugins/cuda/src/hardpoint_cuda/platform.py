"""The cuda platform as the driver sees it: initialises no CUDA, imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from hardpoint.capabilities import Capability, Support
from hardpoint_runtime.accelerator.platform import AcceleratorPlatform
from hardpoint_runtime.accelerator.settings import AcceleratorSettings
from hardpoint_runtime.accelerator.support import recorded_level
from hardpoint_runtime.accelerator.surroundings import Sighting
from hardpoint_runtime.offered import declared

from hardpoint_cuda.detection import CudaSurroundings, look
from hardpoint_cuda.settings import CudaSettings
from hardpoint_cuda.visible_gpus import MASK


class CudaPlatform(AcceleratorPlatform):
    """NVIDIA GPUs, each with a worker of its own."""

    name: ClassVar[str] = "cuda"
    torch_name: ClassVar[str] = "cuda"
    collectives: ClassVar[str] = "nccl"
    untried: ClassVar[str] = "this plugin has never been run on a GPU"
    masks: ClassVar[tuple[str, ...]] = (MASK,)
    graph_variables: ClassVar[Mapping[str, str]] = {"NCCL_GRAPH_REGISTER": "0"}
    """Buffers that NCCL registers while a graph is captured are pinned to the memory that was
    behind them: after sleep, other memory is there, and replays could hang.
    """
    worker_class: ClassVar[str] = "hardpoint_cuda.worker:CudaWorker"
    model_runner_class: ClassVar[str] = "hardpoint_cuda.model_runner:CudaModelRunner"
    capabilities: ClassVar[Mapping[Capability, Support]] = declared(
        Capability.SLEEP, Capability.WEIGHT_RELOAD
    )
    preload: ClassVar[tuple[str, ...]] = (
        "torch",
        "hardpoint_cuda.worker",
        "hardpoint_cuda.model_runner",
    )
    support_level: ClassVar[str] = recorded_level("hardpoint_cuda")
    surroundings: CudaSurroundings | None = None
    """What detection looks at; None for the machine itself."""

    @classmethod
    def default_settings(cls) -> AcceleratorSettings:
        """Return the plugin's own."""
        return CudaSettings()

    def look(self) -> Sighting:
        """Ask NVML, or the system's files where there is none."""
        return look(self.surroundings or CudaSurroundings())
