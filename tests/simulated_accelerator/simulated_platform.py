"""The platform of the simulated accelerator, as a vendor would write it: runtime classes, and the
device brought up in the worker.
"""

from __future__ import annotations

from typing import ClassVar

from hardpoint.capabilities import NOT_YET, YES, Capability
from hardpoint.platform import Platform
from hardpoint.records import Limits, Placement, Verdict

OFFERED = {
    Capability.CHUNKED_PREFILL,
    Capability.PREFIX_CACHING,
    Capability.LOGPROBS,
    Capability.BLOCK_COPIES,
    Capability.GRAPHS,
}


class SimulatedPlatform(Platform):
    name = "simulated"
    worker_class = "simulated_worker:SimulatedWorker"
    model_runner_class = "hardpoint_runtime.model_runner:TorchModelRunner"
    capabilities: ClassVar = {each: YES if each in OFFERED else NOT_YET for each in Capability}

    def probe(self):
        return Verdict(available=True, priority=-1, reason="simulated on the host")

    def limits(self, config):
        return Limits(dtypes=("float32", "bfloat16"), default_dtype="float32")

    def placement(self, config):
        return Placement(default_executor="uni")
