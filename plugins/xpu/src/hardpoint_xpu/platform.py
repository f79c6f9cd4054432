"""The xpu platform as the driver sees it: initialises no Level Zero, imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from hardpoint.capabilities import Capability, Support
from hardpoint.records import ForkSafety, Problem
from hardpoint_runtime.accelerator.platform import AcceleratorPlatform
from hardpoint_runtime.accelerator.settings import AcceleratorSettings
from hardpoint_runtime.accelerator.support import recorded_level
from hardpoint_runtime.accelerator.surroundings import Sighting, Surroundings
from hardpoint_runtime.offered import declared

from hardpoint_xpu.detection import look
from hardpoint_xpu.masks import AFFINITY
from hardpoint_xpu.selector import SELECTOR
from hardpoint_xpu.settings import XpuSettings

if TYPE_CHECKING:
    from hardpoint.config import Config


class XpuPlatform(AcceleratorPlatform):
    """Intel GPUs, each with a worker of its own."""

    name: ClassVar[str] = "xpu"
    torch_name: ClassVar[str] = "xpu"
    collectives: ClassVar[str] = "xccl"
    untried: ClassVar[str] = "this plugin has never been run on an Intel GPU"
    masks: ClassVar[tuple[str, ...]] = (AFFINITY, SELECTOR)
    worker_class: ClassVar[str] = "hardpoint_xpu.worker:XpuWorker"
    model_runner_class: ClassVar[str] = "hardpoint_xpu.model_runner:XpuModelRunner"
    capabilities: ClassVar[Mapping[Capability, Support]] = declared(
        Capability.SLEEP, Capability.WEIGHT_RELOAD
    )
    support_level: ClassVar[str] = recorded_level("hardpoint_xpu")
    exclusive_capabilities: ClassVar[tuple[tuple[Capability, Capability], ...]] = (
        (Capability.SLEEP, Capability.GRAPHS),
    )
    """Each is there where the other is not used: memory moves when it sleeps, and graphs know
    addresses.
    """
    surroundings: Surroundings | None = None
    """What detection looks at; None for the machine itself."""

    @property
    def options(self) -> XpuSettings:
        """The settings, typed."""
        return cast("XpuSettings", self.settings)

    @classmethod
    def default_settings(cls) -> AcceleratorSettings:
        """Return the plugin's own."""
        return XpuSettings()

    def look(self) -> Sighting:
        """Read the kernel's files and the variables that hide devices."""
        return look(self.surroundings or Surroundings())

    def check(self, config: Config) -> Sequence[Problem]:
        """Also return what excludes what."""
        mode = config.graph.graph_mode
        problems = [*super().check(config)]
        if config.parallel.tensor_parallel_size > 1 and mode not in (None, "none"):
            problems.append(
                Problem(
                    key="graph_mode", value=mode,
                    message="with tensor_parallel_size above 1, layers hold collectives of "
                    f"{self.collectives}, which graphs of this device do not capture.",
                    way_out="Leave it out, or set pipeline_parallel_size instead.",
                )
            )  # fmt: skip
        if self.options.sleep == "on" and mode not in (None, "none"):
            problems.append(
                Problem(
                    key="graph_mode", value=mode,
                    message=f"{_both(self.exclusive_capabilities[0])} exclude each other here: "
                    "memory moves when it sleeps, and graphs know addresses.",
                    way_out="Leave it out, or set plugins.xpu.sleep to auto or off.",
                )
            )  # fmt: skip
        return problems

    def fork_safe(self) -> ForkSafety:
        """Never: torch loads a runtime for this device whose threads no fork survives, even before
        one is taken. So workers start as new programs.
        """
        if self.on_substitute:
            return super().fork_safe()
        return ForkSafety(
            safe=False,
            reason="importing torch.xpu starts threads of its runtime, which no fork survives",
        )


def _both(pair: tuple[Capability, Capability]) -> str:
    return " and ".join(capability.value for capability in pair)
