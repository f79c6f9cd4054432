"""The runner of accelerators: the toolkit's, with weights and cache in pools that can sleep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint_runtime.accelerator.device import AcceleratorDeviceOps
from hardpoint_runtime.model_runner import TorchModelRunner

if TYPE_CHECKING:
    from hardpoint_runtime.models import LanguageModel
    from hardpoint_runtime.operations import Operations

WEIGHTS = "weights"
"""The tag of what a model holds: its parameters and buffers."""


class AcceleratorModelRunner(TorchModelRunner):
    """Executes steps of one model on one accelerator."""

    device: AcceleratorDeviceOps

    def make_model(self, operations: Operations) -> LanguageModel:
        """Construct the model in the pool of the weights."""
        with self.device.pool(WEIGHTS):
            return super().make_model(operations)

    def load_weights(self, model: LanguageModel) -> None:
        """Load in that pool: what packing makes anew belongs there, too."""
        with self.device.pool(WEIGHTS):
            super().load_weights(model)
