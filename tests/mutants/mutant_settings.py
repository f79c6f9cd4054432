"""Settings classes that are wrong in one way each."""

from __future__ import annotations

from attrs import define, field, frozen
from hardpoint.config.schema import key


@define(kw_only=True)
class Mutable:
    """Can be changed."""

    size: int = key(1, "a size")


@frozen(kw_only=True)
class Silent:
    """Says nothing of its key."""

    size: int = field(default=1)
