"""What ``SamplingParams.structured_outputs`` asks for, checked as far as that is cheap."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from attrs import frozen
from hardpoint.errors import InvalidRequestError
from hardpoint.records import shown

KINDS = ("json", "json_object", "regex", "choice", "grammar")
LONGEST = 1 << 20
"""Characters of a schema or grammar; more is refused unread."""


@frozen
class Specification:
    """The form of an answer: ``kind`` is ``json`` (``text``: a schema), ``regex`` or ``grammar`` (a
    Lark grammar).
    """

    kind: str
    text: str


def read_specification(wishes: Mapping[str, object]) -> Specification:
    """Return what ``wishes`` ask for: exactly one of ``KINDS``.

    ``json``: a schema, as a mapping or as text. ``json_object``: True. ``regex`` and ``grammar``:
    text. ``choice``: a list of texts. Raises InvalidRequestError.
    """
    given = {kind: value for kind, value in wishes.items() if value is not None}
    if unknown := sorted(set(given) - set(KINDS)):
        _refuse(unknown[0], f"is none of {', '.join(KINDS)}")
    if len(given) != 1:
        named = ", ".join(given) or "nothing"
        _refuse(dict(wishes), f"must name exactly one of {', '.join(KINDS)}, not {named}")
    ((kind, value),) = given.items()
    text = _READERS[kind](value)
    if len(text) > LONGEST:
        _refuse(kind, f"has {len(text)} characters; at most {LONGEST} are read")
    return Specification("json" if kind == "json_object" else _FORMS.get(kind, kind), text)


def _schema(value: object) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            _refuse(value, f"json must be a JSON schema: {error}")
    if not isinstance(value, Mapping):
        _refuse(
            value,
            "json must be a JSON schema, a mapping or its text ({} for any value; any object is "
            "json_object)",
        )
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        _refuse(value, f"json must be plain data: {error}")


def _object(value: object) -> str:
    if value is not True:
        _refuse(value, "json_object must be True")
    return '{"type": "object"}'


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        _refuse(value, "regex and grammar must be non-empty text")
    return value


def _choice(value: object) -> str:
    choices: list[Any] = list(value) if isinstance(value, list | tuple) else []
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        _refuse(value, "choice must be a list of non-empty texts")
    return "|".join(re.escape(choice) for choice in choices)


_READERS = {
    "json": _schema, "json_object": _object, "regex": _text, "choice": _choice, "grammar": _text,
}  # fmt: skip
_FORMS = {"choice": "regex"}


def _refuse(value: object, message: str) -> NoReturn:
    raise InvalidRequestError(
        f"structured_outputs = {shown(value)}: {message}", field="structured_outputs", value=value
    )
