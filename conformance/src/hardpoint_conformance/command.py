"""``hardpoint conformance``."""

from __future__ import annotations

import click


@click.command()
@click.argument("name")
def conformance(name: str) -> None:
    """Certify a platform or an executor."""
