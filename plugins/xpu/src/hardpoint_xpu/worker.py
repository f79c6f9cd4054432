"""The xpu worker: asks torch for the types of its GPU, and keeps sleep and graphs apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from hardpoint.errors import ConfigError, PluginError, UnsupportedError
from hardpoint.records import Problem, SleepReport
from hardpoint_runtime.accelerator.substitute import SubstituteDeviceOps
from hardpoint_runtime.accelerator.worker import AcceleratorWorker

from hardpoint_xpu.device import XpuDeviceOps, XpuSubstituteOps
from hardpoint_xpu.platform import XpuPlatform


class XpuWorker(AcceleratorWorker):
    """One rank on one Intel GPU."""

    device_type: ClassVar[str] = "xpu"
    substitute_class: ClassVar[type[SubstituteDeviceOps]] = XpuSubstituteOps

    @property
    def xpu_platform(self) -> XpuPlatform:
        """The platform, typed."""
        return cast("XpuPlatform", self.platform)

    def port_class(self) -> type[XpuDeviceOps]:
        """Return what this rank's port is. Raises PluginError where torch sees no device: it may be
        built for it, and a runtime be missing.
        """
        module = getattr(torch, self.torch_device, None)
        if module is None or not module.is_available():
            raise PluginError(
                f"torch {torch.__version__} sees no device {self.torch_device!r} in this process: "
                "is Level Zero installed (libze_loader, intel-opencl-icd), and may this user open "
                "/dev/dri?"
            )
        return XpuDeviceOps

    def init_device(self) -> None:
        """Take the device. Raises ConfigError for bfloat16 on one that does not compute in it."""
        super().init_device()
        self.check_bfloat16()

    def check_bfloat16(self) -> None:
        """Ask torch what the platform's table may not know."""
        if self.xpu_platform.on_substitute or self.config.model.dtype != "bfloat16":
            return
        module = self._module()
        if not module.is_bf16_supported(including_emulation=False):
            problem = Problem(
                key="dtype", value="bfloat16",
                message=f"{module.get_device_name(self.port.device)} does not compute in it.",
                way_out="Set it to float32, or to float16.",
            )  # fmt: skip
            raise ConfigError(str(problem), problems=(problem,))

    def sleep(self, level: int) -> SleepReport:
        """Free memory, unless there are graphs. Raises UnsupportedError."""
        self.refuse_to_sleep()
        return super().sleep(level)

    def discard(self, tags: Sequence[str]) -> SleepReport:
        """Free the tags, unless there are graphs. Raises UnsupportedError."""
        self.refuse_to_sleep()
        return super().discard(tags)

    def refuse_to_sleep(self) -> None:
        """Raise UnsupportedError where captured graphs forbid it."""
        if self._runner("sleep").graph_plan.graphs:
            raise UnsupportedError(
                "sleep", "platform 'xpu'",
                reason="memory moves when it sleeps, and there are graphs, which know addresses",
                hint="Set graph_mode to none.",
            )  # fmt: skip

    def _module(self) -> Any:
        return getattr(torch, self.torch_device)
