"""Keys that every accelerator's plugin has."""

from __future__ import annotations

from attrs import frozen
from hardpoint.config.schema import key

HOST = "host"
OFF = "off"


@frozen(kw_only=True)
class AcceleratorSettings:
    """Whether memory can sleep, and how the plugin is tried where its devices are not. Plugins add
    keys of their own.
    """

    sleep: str = key(
        "auto",
        "whether weights and cache lie in pools that can sleep; off: in torch's own memory",
        choices=("auto", OFF),
    )
    substitute: str = key(
        "none",
        "what stands for the device: nothing, or (to try the plugin without one) host memory",
        choices=("none", HOST),
    )
    substitute_devices: int = key(1, "how many devices the substitute has", low=1)
    substitute_bytes: int = key(4 << 30, "memory of each of them", low=1)
