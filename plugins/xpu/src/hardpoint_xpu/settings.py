"""The keys ``plugins.xpu.*``."""

from __future__ import annotations

from attrs import frozen
from hardpoint.config.schema import key
from hardpoint_runtime.accelerator.settings import AcceleratorSettings


@frozen(kw_only=True)
class XpuSettings(AcceleratorSettings):
    """Those of every accelerator, and what excludes what here."""

    sleep: str = key(
        "auto",
        "whether weights and cache can sleep: where no graphs are asked for, always, or never",
        choices=("auto", "on", "off"),
    )
