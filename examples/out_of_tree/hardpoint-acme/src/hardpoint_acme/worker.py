"""The worker: brings the device up, and has this plugin's runner built."""

from __future__ import annotations

from hardpoint_runtime.model_runner import TorchModelRunner
from hardpoint_runtime.worker import TorchWorker

from hardpoint_acme import torch_backend
from hardpoint_acme.device import AcmeDeviceOps
from hardpoint_acme.messages import StepReport
from hardpoint_acme.model_runner import AcmeModelRunner
from hardpoint_acme.platform import AcmePlatform


class AcmeWorker(TorchWorker):
    """One rank on one unit."""

    def make_device(self) -> AcmeDeviceOps:
        """Register the device with torch, and build the port to it: a process sees one unit."""
        torch_backend.install()
        platform: AcmePlatform = self.platform  # type: ignore[assignment]
        return AcmeDeviceOps(platform.options.memory_bytes)

    def make_model_runner(self, device: AcmeDeviceOps) -> TorchModelRunner:  # type: ignore[override]
        """Build the runner, and begin to count what the host reads for it."""
        device.reads = 0
        return super().make_model_runner(device)

    def last_report(self) -> StepReport | None:
        """Return what the last step's output said under ``acme``. For ``collective_rpc``."""
        runner: AcmeModelRunner = self.get_model_runner()  # type: ignore[assignment]
        return runner.report

    def collaborators(self) -> dict[str, str]:
        """Return part -> class of what this rank computes with. For ``collective_rpc``."""
        runner = self.get_model_runner()
        parts: dict[str, object] = {
            "device": self.device,
            "model_runner": runner,
            "timing": runner.timing,
        }
        parts |= {"kv_cache": runner.kv_cache, "requests": runner.requests}
        parts |= {"sampler": runner.sampler, "graphs": runner.graphs, "plan": runner.graph_plan}
        parts |= {"builders": next(iter(runner.builders), None), "operations": runner.operations}
        parts |= {"communicator": self.seat.tensor, "model": runner.model}
        return {
            name: f"{type(part).__module__}.{type(part).__qualname__}"
            for name, part in parts.items() if part is not None
        }  # fmt: skip
