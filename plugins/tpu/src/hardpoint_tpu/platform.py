"""The tpu platform as the driver sees it: touches no device, imports no JAX."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from hardpoint.capabilities import NOT_YET, YES, Capability, Support
from hardpoint.errors import HardpointError
from hardpoint.platform import Platform
from hardpoint.records import Device, ForkSafety, Limits, Placement, Problem, Verdict

from hardpoint_tpu.buckets import LEAST_TILE, BucketError, Buckets, covering, powers, token_shape
from hardpoint_tpu.detection import Surroundings, look
from hardpoint_tpu.settings import TpuSettings
from hardpoint_tpu.shape import ModelShape

if TYPE_CHECKING:
    from hardpoint.config import Config

OFFERED = frozenset(
    {
        Capability.CHUNKED_PREFILL,
        Capability.PREFIX_CACHING,
        Capability.LOGPROBS,
        Capability.LOGPROBS_MODES,
        Capability.GRAMMAR,
        Capability.BLOCK_COPIES,
        Capability.TENSOR_PARALLEL,
        Capability.SLEEP,
        Capability.WEIGHT_RELOAD,
        Capability.SHARDED_STATE,
    }
)
LABEL = "XLA on CPU; never run on a TPU"
"""What this plugin says of itself wherever it computes on the CPU."""
UNTRIED = "this plugin has never been run on a TPU"
WITHOUT = "plugins.tpu.backend = 'cpu' tries it without one"
LARGEST = {"tpu": (256, 4096), "cpu": (64, 1024)}
"""Backend -> the largest batch of requests, and of prompt tokens, that is compiled unasked."""
USUAL = {"tpu": (64, 2048), "cpu": (16, 512)}
"""Backend -> what a step may hold if the configuration does not say."""
LEAST_ROWS = {"tpu": 8, "cpu": 1}
"""Backend -> the smallest batch worth compiling: a TPU computes eight rows at once anyway."""


class TpuPlatform(Platform):
    """TPUs, or the CPU in their place if ``plugins.tpu.backend`` is ``cpu``.

    One worker owns all devices: a layer is shared out by XLA, over a mesh, not by processes.
    """

    name: ClassVar[str] = "tpu"
    worker_class: ClassVar[str] = "hardpoint_tpu.worker:TpuWorker"
    model_runner_class: ClassVar[str] = "hardpoint_tpu.model_runner:TpuModelRunner"
    capabilities: ClassVar[Mapping[Capability, Support]] = {
        capability: YES if capability in OFFERED else NOT_YET for capability in Capability
    }
    unsupported_parameters: ClassVar[Mapping[str, str]] = {
        "extra_args": "no logits processor is there to take them",
    }
    support_level: ClassVar[str] = "L3"
    silent_after: ClassVar[float] = 300.0
    surroundings: Surroundings | None = None
    """What detection looks at; None for the machine itself."""

    def __init__(self, settings: object | None = None) -> None:
        super().__init__(settings if settings is not None else TpuSettings())
        self.exclusive = self.options.backend == "tpu"

    @property
    def options(self) -> TpuSettings:
        """The settings, typed."""
        return cast("TpuSettings", self.settings)

    @property
    def on_cpu(self) -> bool:
        """Whether the CPU stands in for TPUs."""
        return self.options.backend == "cpu"

    def probe(self) -> Verdict:
        """Say which chips are visible, or why none is; on the CPU, that it is one only by name."""
        around = self.surroundings or Surroundings()
        if not around.installed("jax"):
            return Verdict(
                available=False,
                reason="the package jax is not installed (pip install hardpoint-tpu)",
            )
        if self.on_cpu:
            return Verdict(
                available=True,
                priority=-100,
                reason=f"{LABEL}: plugins.tpu.backend = 'cpu'",
                devices=(
                    Device(id="0", name="XLA on CPU", memory_bytes=self.options.memory_bytes),
                ),
            )
        seen = look(around)
        if not seen.chips:
            reasons = "; ".join(seen.reasons)
            return Verdict(available=False, reason=f"{reasons} ({WITHOUT})")
        called = f" ({seen.accelerator_type})" if seen.accelerator_type else ""
        return Verdict(
            available=True,
            priority=100,
            reason=f"{len(seen.chips)} chips{called}; {UNTRIED}",
            devices=tuple(
                Device(id=str(index), name=name) for index, name in enumerate(seen.chips)
            ),
        )

    def limits(self, config: Config) -> Limits:
        """Return the largest static shapes. A step is all prompts or all single tokens, and a chunk
        of a prompt fills whole tiles.
        """
        rows, tokens = self._row_sizes(), self._token_sizes()
        usual_rows, usual_tokens = USUAL[self.options.backend]
        return Limits(
            dtypes=("float32", "bfloat16"),
            default_dtype="float32" if self.on_cpu else "bfloat16",
            block_sizes=(16, 32, 64, 128, 8),
            mixed_batches=False,
            chunk_multiple=LEAST_TILE,
            max_num_seqs=rows[-1],
            max_num_batched_tokens=max(rows[-1], tokens[-1]),
            default_max_num_seqs=min(usual_rows, rows[-1]),
            default_max_num_batched_tokens=min(usual_tokens, tokens[-1]),
        )

    def buckets(self, config: Config) -> Buckets:
        """Return the shapes to compile for a complete configuration: none that no step can have."""
        scheduler = config.scheduler
        usual_rows, usual_tokens = USUAL[self.options.backend]
        return Buckets(
            rows=covering(self._row_sizes(), scheduler.max_num_seqs or usual_rows),
            tokens=covering(self._token_sizes(), scheduler.max_num_batched_tokens or usual_tokens),
        )

    def placement(self, config: Config) -> Placement:
        """One worker that owns as many devices as share each layer."""
        devices = config.parallel.tensor_parallel_size
        return Placement(
            num_workers=1,
            devices_per_worker=devices,
            resources_per_worker={"CPU": 1.0} if self.on_cpu else {"TPU": float(devices)},
        )

    def check(self, config: Config) -> Sequence[Problem]:
        """Return what of the model and of the plugin's own settings cannot be honoured."""
        return tuple(self._problems(config))

    def environment(self, config: Config, placement: Placement) -> Mapping[str, str]:
        """On the CPU of a machine with libtpu, keep JAX from taking the TPUs."""
        around = self.surroundings or Surroundings()
        if self.on_cpu and around.installed("libtpu"):
            return {"JAX_PLATFORMS": "cpu"}
        return {}

    def assigned_devices(self, resources: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        """Return the launcher's TPUs."""
        return tuple(resources.get("TPU", ()))

    def fork_safe(self) -> ForkSafety:
        """Never: importing JAX starts threads already, and they do not survive a fork."""
        loaded = (
            "it is loaded here already" if "jax" in sys.modules else "though not loaded here yet"
        )
        return ForkSafety(
            safe=False,
            reason=f"importing JAX starts threads, which no fork survives ({loaded})",
        )

    def _row_sizes(self) -> tuple[int, ...]:
        backend = self.options.backend
        chosen = self.options.request_buckets
        return (
            tuple(sorted(set(chosen)))
            if chosen
            else powers(LEAST_ROWS[backend], LARGEST[backend][0])
        )

    def _token_sizes(self) -> tuple[int, ...]:
        chosen = self.options.token_buckets
        return (
            tuple(sorted(set(chosen)))
            if chosen
            else powers(LEAST_TILE, LARGEST[self.options.backend][1])
        )

    def _problems(self, config: Config) -> Iterator[Problem]:
        for name in ("request_buckets", "token_buckets"):
            value = getattr(self.options, name)
            if value is not None and (not value or min(value) < 1):
                yield Problem(
                    key=f"plugins.tpu.{name}", value=value, message="must be sizes of at least 1."
                )
        try:
            for tokens in self._token_sizes():
                token_shape(tokens)
        except BucketError as error:
            yield Problem(
                key="plugins.tpu.token_buckets",
                value=self.options.token_buckets,
                message=f"{error}.",
                way_out="Use powers of two of at least 16.",
            )
        if config.description is not None:
            try:
                ModelShape.of(config.description, 1)  # how heads are spread is judged for all
            except HardpointError as error:
                yield Problem(key="model", value=config.model.model, message=f"{error}.")
