"""The driver's side: what the fake device can do. Touches nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from hardpoint.capabilities import NOT_YET, RESERVED, YES, Capability, Support
from hardpoint.platform import Platform, RequestView
from hardpoint.records import Device, Limits, Placement, Problem, Verdict

from hardpoint_dummy.devices import VISIBLE, devices_of, visible
from hardpoint_dummy.faults import parse_faults
from hardpoint_dummy.settings import DummySettings

if TYPE_CHECKING:
    from hardpoint.config import Config

RESOURCE = "dummy"
"""What launchers that place by resource call a fake device."""


class DummyPlatform(Platform):
    """A device that is always there, offers nearly all, and is chosen only by name."""

    name: ClassVar[str] = "dummy"
    worker_class: ClassVar[str] = "hardpoint_dummy.worker:DummyWorker"
    model_runner_class: ClassVar[str] = "hardpoint_dummy.model_runner:DummyModelRunner"
    capabilities: ClassVar[Mapping[Capability, Support]] = {
        **dict.fromkeys(Capability, YES),
        **dict.fromkeys(RESERVED, NOT_YET),  # what it does of them is by its own records
        Capability.LOGITS_PROCESSORS: NOT_YET,  # its logits are plain lists
    }
    preload: ClassVar[tuple[str, ...]] = ("hardpoint_dummy.worker", "hardpoint_dummy.model_runner")
    support_level: ClassVar[str] = "L1"

    def __init__(self, settings: object | None = None) -> None:
        super().__init__(settings if settings is not None else DummySettings())
        self.exclusive = self.options.exclusive
        # Of this platform as it is set, as no other device's is.
        self.silent_after = self.options.silent_after  # type: ignore[misc]

    @property
    def options(self) -> DummySettings:
        """The settings, typed."""
        return cast("DummySettings", self.settings)

    def probe(self) -> Verdict:
        """Say that it is usable; the negative priority keeps it from ever being chosen unasked."""
        devices = self.visible_devices(mask := os.environ.get(VISIBLE))
        if not devices:
            return Verdict(available=False, reason=f"{VISIBLE}={mask} hides every fake device")
        return Verdict(
            available=True,
            priority=-100,
            reason="a fake device, used only when named: platform = 'dummy'",
            devices=devices,
        )

    def visible_devices(self, mask: str | None) -> tuple[Device, ...]:
        """Return the devices that DUMMY_VISIBLE_DEVICES leaves where it is ``mask``."""
        options = self.options
        return visible(devices_of(options.num_devices, options.memory_bytes), mask)

    def limits(self, config: Config) -> Limits:
        """Return the limits that the settings describe."""
        options = self.options
        return Limits(
            dtypes=("float32", "bfloat16"),
            default_dtype="float32",
            block_sizes=options.block_sizes,
            mixed_batches=options.mixed_batches,
            max_prefills_per_step=options.max_prefills_per_step,
            chunk_multiple=options.chunk_multiple,
            reserved_blocks=options.reserved_blocks,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            async_scheduling=True,
        )

    def placement(self, config: Config) -> Placement:
        """Return one worker per rank; the first tensor rank of the last stage sends results."""
        parallel = config.parallel
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        workers = self.options.num_workers or ranks
        return Placement(
            num_workers=workers,
            output_rank=max(0, workers - parallel.tensor_parallel_size),
            num_hosts=parallel.nnodes,
            resources_per_worker={RESOURCE: 1.0},
        )

    def assigned_devices(self, resources: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        """Return the fake devices that a launcher gave."""
        return tuple(resources.get(RESOURCE, ()))

    def check(self, config: Config) -> Sequence[Problem]:
        """Return what is wrong with the settings."""
        try:
            parse_faults(self.options.fail_at)
        except ValueError as error:
            return (
                Problem(
                    key="plugins.dummy.fail_at", value=self.options.fail_at, message=str(error)
                ),
            )
        return ()

    def check_request(self, request: RequestView) -> Problem | None:
        """Refuse what a device without words cannot honour."""
        if request.sampling.bad_words or request.sampling.bad_word_ids:
            return Problem(
                key="bad_words",
                value=request.sampling.bad_words,
                message="the dummy platform knows no words, only token ids.",
                way_out="Use logit_bias.",
            )
        return None
