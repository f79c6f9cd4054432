"""The keys ``plugins.mp.*``."""

from __future__ import annotations

from attrs import frozen
from hardpoint.config.schema import key


@frozen(kw_only=True)
class MultiprocSettings:
    """How worker processes are started."""

    start: str = key(
        "auto",
        "how a worker's process begins: forked by a preloaded nursery, or a plain interpreter",
        choices=("auto", "nursery", "plain"),
    )
