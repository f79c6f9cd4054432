"""``hardpoint new platform NAME`` and ``hardpoint new executor NAME``."""

from __future__ import annotations

import click

from hardpoint_scaffold.names import checked_names

EDIT_FIRST = {"platform": "device.py", "executor": "executor.py"}


@click.group()
def new() -> None:
    """Write a plugin that works before it is edited: asks nothing, overwrites nothing."""


@new.command()
@click.argument("name")
def platform(name: str) -> None:
    """Write ./hardpoint-NAME: a platform on torch, for which the host's torch stands in."""
    _write("platform", name)


@new.command()
@click.argument("name")
def executor(name: str) -> None:
    """Write ./hardpoint-NAME: an executor whose workers are threads of the driver."""
    _write("executor", name)


def _write(kind: str, name: str) -> None:
    names = checked_names(kind, name)
    from hardpoint_scaffold.project import render, write

    files = render(names)
    folder = write(names, files)
    first = f"src/{names.package}/{EDIT_FIRST[kind]}"
    click.echo(f"{folder.name}: {len(files)} files")
    click.echo(f"  edit first    {folder.name}/{first}")
    click.echo(f"  install       pip install --editable './{folder.name}[test]'")
    click.echo(f"  run           hardpoint doctor {name}")
    click.echo(f"  certify       hardpoint conformance {name}")
