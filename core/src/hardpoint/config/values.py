"""Single values: how plain data from Python or TOML, and text from a command line or the
environment, become the type that a key declares. Strict: a text is no number unless it came as
text.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Mapping
from typing import Any

LARGEST = 2**63 - 1
"""The largest whole number a key takes: what a signed 64-bit field below can hold."""

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")


class Text(str):
    """A value that came as text (flag, ``--set``, environment) and is read as its key's type.

    Plugins' keys keep it until their settings class, and so their type, is known.
    """

    __slots__ = ()


def whole(value: object) -> int:
    """Return ``value`` as an int; what has ``__index__`` counts, but bool. Raises ValueError."""
    given: Any = value
    try:
        result = int(given) if isinstance(given, Text) else operator.index(given)
    except (TypeError, ValueError):
        raise ValueError("must be a whole number") from None
    if isinstance(value, bool):
        raise ValueError("must be a whole number")  # noqa: TRY004 - one error for all that is wrong
    if abs(result) > LARGEST:
        raise ValueError(f"must be a whole number of at most {LARGEST}")
    return result


def number(value: object) -> float:
    """Return ``value`` as a finite float. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float | Text):
        raise ValueError("must be a number")  # noqa: TRY004 - one error for all that is wrong
    try:
        result = float(value)
    except (ValueError, OverflowError):
        raise ValueError("must be a number") from None
    if not math.isfinite(result):
        raise ValueError("must be a finite number")
    return result


def truth(value: object) -> bool:
    """Return ``value`` as a bool; as text true/false, yes/no, on/off, 1/0. Raises ValueError."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Text) and value.lower() in _TRUE + _FALSE:
        return value.lower() in _TRUE
    raise ValueError("must be true or false")


def string(value: object) -> str:
    """Return ``value`` as a str; a path object counts. Raises ValueError."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise ValueError("must be text")  # noqa: TRY004 - one error for all that is wrong
    return str(value)


def text(value: object) -> str:
    """Return ``value`` as :func:`string` does, but not empty: no name or path is. Raises
    ValueError.
    """
    result = string(value)
    if not result:
        raise ValueError("must not be empty")
    return result


def items(value: object) -> list[object]:
    """Return the items of a list; a text is split at commas. Raises ValueError."""
    if isinstance(value, Text):
        return [Text(part.strip()) for part in value.split(",") if part.strip()]
    if isinstance(value, list | tuple | set | frozenset):
        return sorted(value) if isinstance(value, set | frozenset) else list(value)
    raise ValueError("must be a list")


def strings(value: object) -> tuple[str, ...]:
    """Return a list of texts as a tuple. Raises ValueError."""
    try:
        return tuple(text(item) for item in items(value))
    except (TypeError, ValueError):
        raise ValueError("must be a list of texts") from None


def wholes(value: object) -> tuple[int, ...]:
    """Return a list of whole numbers as a tuple. Raises ValueError."""
    try:
        return tuple(whole(item) for item in items(value))
    except (TypeError, ValueError):
        raise ValueError("must be a list of whole numbers") from None


def table(value: object) -> dict[str, object]:
    """Return a mapping with text keys; as text ``A=B,C=D``. Raises ValueError."""
    if isinstance(value, Text):
        pairs = [str(part).partition("=") for part in items(value)]
        if all(name and sign for name, sign, _ in pairs):
            return {name.strip(): Text(content.strip()) for name, _, content in pairs}
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return dict(value)
    raise ValueError("must be a table of NAME = VALUE")


def reference(value: object) -> str | type:
    """Return a name, a reference, or a class as it is. Raises ValueError."""
    if isinstance(value, type):
        return value
    try:
        return text(value)
    except ValueError:
        raise ValueError("must be a name, a reference 'module:Class' or a class") from None


def references(value: object) -> tuple[str | type, ...]:
    """Return a list of references and classes as a tuple. Raises ValueError."""
    try:
        return tuple(reference(item) for item in items(value))
    except (TypeError, ValueError):
        raise ValueError("must be a list of references 'module:Class' or classes") from None


def refusal(value: Any, metadata: Mapping[str, Any]) -> str:
    """Return why ``value``, of the right type, is outside the choices or bounds of
    :func:`hardpoint.config.schema.key`, or "".
    """
    if value is None:
        return ""
    choices = metadata.get("choices") or ()
    chosen = value if isinstance(value, tuple | list) else (value,)
    if choices and any(item not in choices for item in chosen):
        return f"must be one of {', '.join(map(str, choices))}"
    numbers = [
        item for item in chosen if isinstance(item, int | float) and not isinstance(item, bool)
    ]
    low, above, high = (metadata.get(name) for name in ("low", "above", "high"))
    wrong = any(
        (low is not None and item < low)
        or (above is not None and item <= above)
        or (high is not None and item > high)
        for item in numbers
    )
    parts = [] if low is None else [f"at least {low:g}"]
    parts += [] if above is None else [f"more than {above:g}"]
    parts += [] if high is None else [f"at most {high:g}"]
    return f"must be {' and '.join(parts)}" if wrong else ""
