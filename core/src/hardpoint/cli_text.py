"""Plain text and JSON for the commands of core; columns without a library, to be quick."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click


def columns(rows: Sequence[Sequence[str]], *, indent: str = "") -> str:
    """Return ``rows`` with their cells aligned; the last column may be of any width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def one_line(text: str) -> str:
    """Return ``text`` with its line breaks as spaces."""
    return " ".join(text.split())


def print_json(document: Mapping[str, Any]) -> None:
    """Write one JSON document to standard output; values that JSON lacks as their text."""
    click.echo(json.dumps(document, indent=2, default=_plain))


def _plain(value: object) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    return str(value)
