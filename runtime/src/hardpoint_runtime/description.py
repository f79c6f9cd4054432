"""The model's description, which the driver reads and every worker needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint.errors import HardpointError

if TYPE_CHECKING:
    from hardpoint.checkpoints.description import ModelDescription
    from hardpoint.records import WorkerContext


def described(context: WorkerContext) -> ModelDescription:
    """Return it; raise HardpointError if the engine has not read it."""
    description = context.config.description
    if description is None:
        raise HardpointError(
            "the configuration has no model description; the engine reads it before it starts "
            "workers (hardpoint.checkpoints.read_description)"
        )
    return description
