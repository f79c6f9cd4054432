"""The driver's side: what the device can do. Touches it not, and imports no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, cast

from hardpoint.capabilities import NEVER, NOT_YET, YES, Capability, Support
from hardpoint.platform import Platform
from hardpoint.records import Device, Limits, Placement, Verdict

from hardpoint_acme.settings import AcmeSettings

if TYPE_CHECKING:
    from hardpoint.config import Config

OFFERED = frozenset(
    {
        Capability.CHUNKED_PREFILL,
        Capability.PREFIX_CACHING,
        Capability.LOGPROBS,
        Capability.PROMPT_LOGPROBS,
        Capability.GRAMMAR,
        Capability.POOLING,
        Capability.BLOCK_COPIES,
        Capability.GRAPHS,
        Capability.TENSOR_PARALLEL,
        Capability.PIPELINE_PARALLEL,
    }
)


class AcmePlatform(Platform):
    """One unit per worker; taken only by name, as it is not there."""

    name: ClassVar[str] = "acme"
    worker_class: ClassVar[str] = "hardpoint_acme.worker:AcmeWorker"
    model_runner_class: ClassVar[str] = "hardpoint_acme.model_runner:AcmeModelRunner"
    capabilities: ClassVar[Mapping[Capability, Support]] = {
        **{each: YES if each in OFFERED else NOT_YET for each in Capability},
        Capability.MULTIMODAL: NEVER,
    }
    support_level: ClassVar[str] = "L1"

    def __init__(self, settings: object | None = None) -> None:
        super().__init__(settings if settings is not None else AcmeSettings())

    @property
    def options(self) -> AcmeSettings:
        """The settings, typed."""
        return cast("AcmeSettings", self.settings)

    def probe(self) -> Verdict:
        """Look for torch without importing it; the device comes with this plugin."""
        if importlib.util.find_spec("torch") is None:
            return Verdict(available=False, reason="the package torch is not installed")
        return Verdict(
            available=True,
            priority=-1,
            reason="a simulated unit, used only when named: platform = 'acme'",
            devices=(Device(id="0", name="unit", memory_bytes=self.options.memory_bytes),),
        )

    def limits(self, config: Config) -> Limits:
        """Return what a unit computes."""
        return Limits(
            dtypes=("float32", "bfloat16"), default_dtype="float32", block_sizes=(16, 32, 8)
        )

    def placement(self, config: Config) -> Placement:
        """One worker for each rank."""
        parallel = config.parallel
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        return Placement(num_workers=ranks, output_rank=ranks - parallel.tensor_parallel_size)
