"""Reading values out of a configuration that came with a model: typed, bounded, named in errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hardpoint.checkpoints.tables import shown
from hardpoint.errors import CheckpointError

LARGEST: Final = 1 << 31
ABSENT: Final = object()


class Fields:
    """The keys of one configuration file; every failure names the file, the key and the value."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def fail(self, key: str, value: object, expected: str) -> CheckpointError:
        """Make the error for a value that cannot be."""
        return CheckpointError(
            f"{self.path}: {key} is {shown(value)}; it must be {expected}: the file is corrupt or "
            f"belongs to another kind of model"
        )

    def integer(self, key: str, default: Any = ABSENT, *, low: int = 1, high: int = LARGEST) -> int:
        """Return a whole number between the bounds; absent or null gives the default if any."""
        value = self.values.get(key)
        if value is None and default is not ABSENT:
            return int(default)
        if type(value) is not int or not low <= value <= high:
            raise self.fail(key, value, f"a whole number from {low} to {high}")
        return value

    def real(self, key: str, default: Any = ABSENT, *, above: float = 0.0) -> float:
        """Return a finite number greater than ``above``."""
        value: Any = self.values.get(key)
        if value is None and default is not ABSENT:
            return float(default)
        number = float(value) if type(value) in (int, float) and abs(value) < 1e38 else math.nan
        if not number > above or math.isinf(number):
            raise self.fail(key, value, f"a number greater than {above:g}")
        return number

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        """Return a string."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fail(key, value, "a string")
        return value

    def table(self, key: str) -> Mapping[str, Any] | None:
        """Return a table of strings to values, or None if it is absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.fail(key, value, "a table")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...] | None:
        """Return one token id or a list of them as a tuple; None if the key is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        for item in ids:
            if type(item) is not int or not 0 <= item < vocab_size:
                raise self.fail(key, item, f"a token id from 0 to {vocab_size - 1}")
        return tuple(dict.fromkeys(ids))
