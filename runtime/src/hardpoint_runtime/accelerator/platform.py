"""The part of a platform that accelerators have in common: the driver's side, without torch.

A process sees logical devices: those that the platform's own variables leave, in their order. Rank
i of a host takes logical device i; nothing here sets such a variable.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, cast

from hardpoint.platform import Platform
from hardpoint.records import Device, ForkSafety, Limits, Placement, Problem, Verdict

from hardpoint_runtime.accelerator.settings import HOST, OFF, AcceleratorSettings
from hardpoint_runtime.accelerator.start_safety import fork_safety
from hardpoint_runtime.accelerator.surroundings import Sighting
from hardpoint_runtime.accelerator.visible_devices import logical

if TYPE_CHECKING:
    from hardpoint.config import Config

ON_THIS_HOST = (None, "uni", "mp")
"""Executors whose workers all use the driver's own devices, where there is one host."""


class AcceleratorPlatform(Platform):
    """Devices with memory of their own, one for each worker.

    Subclasses set the class attributes and say in :meth:`look` what they see.
    """

    torch_name: ClassVar[str]
    """What torch calls the device."""
    collectives: ClassVar[str]
    """The backend of torch.distributed for its tensors."""
    untried: ClassVar[str]
    """What has never been tried, in a few words: the verdict says so."""
    resource: ClassVar[str] = "GPU"
    """What launchers that place by resource call one device."""
    masks: ClassVar[tuple[str, ...]]
    """The variables that hide devices, the one that a launcher sets first."""
    graph_variables: ClassVar[Mapping[str, str]] = {}
    """What :attr:`collectives` needs of a worker's environment where graphs hold its operations
    over memory that sleeps.
    """
    silent_after: ClassVar[float] = 180.0
    block_sizes: ClassVar[tuple[int, ...]] = (16, 32, 64, 128, 8)

    def __init__(self, settings: object | None = None) -> None:
        super().__init__(settings if settings is not None else self.default_settings())

    @classmethod
    def default_settings(cls) -> AcceleratorSettings:
        """Return the settings where the configuration has none."""
        return AcceleratorSettings()

    @property
    def accelerator_settings(self) -> AcceleratorSettings:
        """The settings, typed."""
        return cast("AcceleratorSettings", self.settings)

    @property
    def on_substitute(self) -> bool:
        """Whether host memory stands for the devices."""
        return self.accelerator_settings.substitute == HOST

    @property
    def sleeps(self) -> bool:
        """Whether weights and cache lie in pools that can sleep."""
        return self.accelerator_settings.sleep != OFF

    @abstractmethod
    def look(self) -> Sighting:
        """Return what devices this process could use. Initialises none, raises nothing."""

    @cached_property
    def sighting(self) -> Sighting:
        """What was seen, once for each platform."""
        return self._substitutes() if self.on_substitute else self.look()

    def probe(self) -> Verdict:
        """Say which devices are usable, or why none is; a substitute is one only by name."""
        seen = self.sighting
        if not seen.devices:
            reasons = "; ".join(seen.reasons) or "no device is there"
            return Verdict(available=False, reason=reasons)
        if self.on_substitute:
            return Verdict(
                available=True, priority=-100, devices=seen.devices,
                reason=f"host memory stands for the device (plugins.{self.name}.substitute = "
                f"{HOST!r}): for trying the plugin, not for use",
            )  # fmt: skip
        features = (_named(seen.features),) if seen.features else ()
        told = "; ".join((_counted(seen.devices), *features, *seen.notes, self.untried))
        return Verdict(available=True, priority=100, reason=told, devices=seen.devices)

    def limits(self, config: Config) -> Limits:
        """Return what can be executed. ``dtype = auto`` is bfloat16 where the devices compute in
        it, else float32, as where host memory stands for them: float16 ends at 65504, so it is
        there for those who ask.
        """
        types = self.dtypes()
        return Limits(dtypes=types, default_dtype=types[0], block_sizes=self.block_sizes)

    def dtypes(self) -> tuple[str, ...]:
        """Return the types that all visible devices compute in, the default first."""
        if self.on_substitute:
            return ("float32", "bfloat16", "float16")
        has = self.sighting.features.get("bfloat16", True)
        return ("bfloat16", "float32", "float16") if has else ("float32", "float16")

    def placement(self, config: Config) -> Placement:
        """One worker for each rank, on a device of its own."""
        parallel = config.parallel
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        return Placement(
            num_workers=ranks,
            resources_per_worker={self.resource: 1.0},
            output_rank=ranks - parallel.tensor_parallel_size,
            num_hosts=parallel.nnodes,
        )

    def check(self, config: Config) -> Sequence[Problem]:
        """Return what of the devices asked for is not there."""
        return tuple(self._too_few(config))

    def environment(self, config: Config, placement: Placement) -> Mapping[str, str]:
        """Return :attr:`graph_variables` where ranks share layers, unless a key forbids graphs or
        sleep. No mask is among them.
        """
        held = config.parallel.tensor_parallel_size > 1 and config.graph.graph_mode != "none"
        return self.graph_variables if held and self.sleeps and not self.on_substitute else {}

    def assigned_devices(self, resources: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        """Return the launcher's devices, by their numbers under the mask of this process."""
        mask = next((os.environ[name] for name in self.masks if name in os.environ), None)
        return logical(resources.get(self.resource, ()), mask)

    def fork_safe(self) -> ForkSafety:
        """See :mod:`hardpoint_runtime.accelerator.start_safety`."""
        return fork_safety(self.torch_name)

    def _too_few(self, config: Config) -> Iterator[Problem]:
        placement, asked = self.placement(config), config.device.devices
        count = len(self.sighting.devices)
        for each in asked or ():
            if not each.isdecimal() or int(each) >= count:
                yield Problem(
                    key="devices", value=asked,
                    message=f"{each!r} is none of the {count} devices that this process sees.",
                    way_out=f"Their numbers are 0 to {count - 1}, whatever hides others.",
                )  # fmt: skip
        here = placement.num_hosts == 1 and config.executor in ON_THIS_HOST
        if here and asked is None and placement.num_workers > count:
            tensor = config.parallel.tensor_parallel_size
            key = "tensor_parallel_size" if tensor > 1 else "pipeline_parallel_size"
            yield Problem(
                key=key, value=tensor if tensor > 1 else config.parallel.pipeline_parallel_size,
                message=f"needs {placement.num_workers} devices, one for each worker, and this "
                f"process sees {count}.",
                way_out=self.more_devices(),
            )  # fmt: skip

    def more_devices(self) -> str:
        """Return how this process may come to see more devices."""
        if self.on_substitute:
            return f"Raise plugins.{self.name}.substitute_devices."
        hiding = ", ".join(name for name in self.masks if name in os.environ)
        return f"Lower it, or show more with {hiding}." if hiding else "Lower it."

    def _substitutes(self) -> Sighting:
        options = self.accelerator_settings
        return Sighting(
            devices=tuple(
                Device(id=str(n), name="host memory", memory_bytes=options.substitute_bytes)
                for n in range(options.substitute_devices)
            )
        )


def _named(features: Mapping[str, object]) -> str:
    """Return ``generation Hopper, bfloat16, float8 fnuz``: what all devices have, or have not."""
    told = []
    for name, value in features.items():
        if isinstance(value, bool) or value is None:
            told.append(name if value else f"no {name}")
        else:
            told.append(f"{name} {value}")
    return ", ".join(told)


def _counted(devices: Sequence[Device]) -> str:
    """Return ``2 x Name``, for each name."""
    names = [device.name for device in devices]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
