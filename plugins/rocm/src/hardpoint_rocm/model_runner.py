"""The rocm model runner."""

from __future__ import annotations

from hardpoint_runtime.accelerator.model_runner import AcceleratorModelRunner


class RocmModelRunner(AcceleratorModelRunner):
    """Executes steps of one model on one AMD GPU."""
