"""The rocm platform as the driver sees it: initialises no HIP, imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from hardpoint.capabilities import Capability, Support
from hardpoint_runtime.accelerator.platform import AcceleratorPlatform
from hardpoint_runtime.accelerator.settings import AcceleratorSettings
from hardpoint_runtime.accelerator.support import recorded_level
from hardpoint_runtime.accelerator.surroundings import Sighting
from hardpoint_runtime.offered import declared

from hardpoint_rocm.detection import RocmSurroundings, look
from hardpoint_rocm.masks import CUDA, HIP, ROCR
from hardpoint_rocm.settings import RocmSettings

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.records import Placement


class RocmPlatform(AcceleratorPlatform):
    """AMD GPUs, each with a worker of its own. torch calls them ``cuda``, and RCCL ``nccl``."""

    name: ClassVar[str] = "rocm"
    torch_name: ClassVar[str] = "cuda"
    collectives: ClassVar[str] = "nccl"
    untried: ClassVar[str] = "this plugin has never been run on AMD hardware"
    masks: ClassVar[tuple[str, ...]] = (HIP, CUDA, ROCR)
    graph_variables: ClassVar[Mapping[str, str]] = {"NCCL_GRAPH_REGISTER": "0"}
    """As RCCL calls it, too. Buffers that are registered while a graph is captured are pinned to
    the memory that was behind them: after sleep, other memory is there.
    """
    worker_class: ClassVar[str] = "hardpoint_rocm.worker:RocmWorker"
    model_runner_class: ClassVar[str] = "hardpoint_rocm.model_runner:RocmModelRunner"
    capabilities: ClassVar[Mapping[Capability, Support]] = declared(
        Capability.SLEEP, Capability.WEIGHT_RELOAD
    )
    preload: ClassVar[tuple[str, ...]] = (
        "torch",
        "hardpoint_rocm.worker",
        "hardpoint_rocm.model_runner",
    )
    support_level: ClassVar[str] = recorded_level("hardpoint_rocm")
    surroundings: RocmSurroundings | None = None
    """What detection looks at; None for the machine itself."""

    @classmethod
    def default_settings(cls) -> AcceleratorSettings:
        """Return the plugin's own."""
        return RocmSettings()

    def environment(self, config: Config, placement: Placement) -> Mapping[str, str]:
        """Return what graphs with collectives need: they are only made where that is asked for."""
        asked = config.graph.graph_mode is not None
        return super().environment(config, placement) if asked else {}

    def look(self) -> Sighting:
        """Ask AMD SMI, or the system's files where there is none."""
        return look(self.surroundings or RocmSurroundings())
