"""The cuda model runner."""

from __future__ import annotations

from hardpoint_runtime.accelerator.model_runner import AcceleratorModelRunner


class CudaModelRunner(AcceleratorModelRunner):
    """Executes steps of one model on one NVIDIA GPU."""
