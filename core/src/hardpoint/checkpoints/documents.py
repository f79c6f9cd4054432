"""JSON that came with a model: bounded in size and depth, no key twice, no NaN, no giant number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from hardpoint.checkpoints.files import read_whole
from hardpoint.checkpoints.tables import shown
from hardpoint.errors import CheckpointError

LARGEST_DOCUMENT: Final = 64 << 20


class _RefusedError(ValueError):
    pass


def parse_object(raw: bytes, path: Path, what: str = "the file") -> dict[str, Any]:
    """Parse a JSON object; CheckpointError, naming the file, if it is anything else."""
    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_without_twins, parse_constant=_refuse_constant
        )
    except RecursionError as error:
        raise CheckpointError(f"{path}: {what} is nested too deeply") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {what} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: {what} is not a JSON object")
    return value


def read_object(path: Path, limit: int = LARGEST_DOCUMENT) -> dict[str, Any]:
    """Read a JSON object from a file of at most ``limit`` bytes."""
    return parse_object(read_whole(path, limit), path)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RefusedError(f"the key {shown(key)} appears twice")
            seen.add(key)
    return values


def _refuse_constant(name: str) -> None:
    raise _RefusedError(f"{name} is not a number")
