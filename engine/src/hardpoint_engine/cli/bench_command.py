"""``hardpoint bench``, declared. Light: its help must not load the engine."""

from __future__ import annotations

import click


@click.group(short_help="Measure what Hardpoint costs, beside its peers.")
def bench() -> None:
    """Measure what Hardpoint costs, beside its peers."""
