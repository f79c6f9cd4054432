"""``--peer NAME=PYTHON`` of the benchmarks: which interpreter runs a peer."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import click


def interpreters(peers: Sequence[str], known: Collection[str]) -> dict[str, str]:
    """Return peer -> interpreter. Raises click.BadParameter."""
    found = {}
    for each in peers:
        name, _, python = each.partition("=")
        if name not in known or not python:
            raise click.BadParameter(
                f"{each!r} is not NAME=PYTHON with one of {', '.join(known)}", param_hint="--peer"
            )
        found[name] = python
    return found
