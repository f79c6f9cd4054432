"""The keys ``plugins.rocm.*``."""

from __future__ import annotations

from attrs import frozen
from hardpoint_runtime.accelerator.settings import AcceleratorSettings


@frozen(kw_only=True)
class RocmSettings(AcceleratorSettings):
    """Those of every accelerator."""
