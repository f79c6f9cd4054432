"""``hardpoint plugins``: every plugin found and what became of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import click

from hardpoint.cli_text import columns, one_line, print_json
from hardpoint.errors import HardpointError


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--no-load", is_flag=True, help="Read metadata only: import nothing, leave API and level open."
)
def plugins(as_json: bool, no_load: bool) -> None:
    """List every plugin found.

    Each light plugin module is imported, as on a run, to learn its contract API and whether it
    works, and each platform is asked whether it is usable here; the name printed is the name to use
    in the configuration.
    """
    from hardpoint.config.loading import load_config
    from hardpoint.registry import Registry

    registry = Registry.discover(load_config(), diagnosis=True)
    with _unsaid():
        rows = [_row(registry, kind, index, load=not no_load) for kind, index in _order(registry)]
    if as_json:
        print_json({"plugins": rows})
        return
    if not rows:
        click.echo("No plugin is installed. To add one: pip install hardpoint-NAME.")
        return
    heads = ("kind", "name", "distribution", "version", "api", "level", "state", "reason")
    table = [tuple(head.upper() for head in heads)]
    for row in rows:
        hindered = row["available"] is False and row["state"] == "loaded"
        reason = row["reason"] or (row["verdict"] if hindered else row["summary"])
        cells = {**row, "level": row["support_level"], "reason": one_line(reason)}
        cells["state"] = "unavailable" if hindered else row["state"]
        table.append(tuple(cells[head] or "-" for head in heads))
    click.echo(columns(table))


@contextlib.contextmanager
def _unsaid() -> Iterator[None]:
    """Keep the log quiet of what the list itself says, and of how long probes take."""
    logger = logging.getLogger("hardpoint.registry")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _order(registry: Any) -> list[tuple[str, int]]:
    return [(plugin.kind, index) for index, plugin in enumerate(registry.plugins)]


def _row(registry: Any, kind: str, index: int, *, load: bool) -> dict[str, Any]:
    """Load one plugin, whatever comes of it, and describe it. What it raises is its reason."""
    name = registry.plugins[index].name
    level, verdict = "", None
    if load and kind != "command" and registry.plugins[index].state == "found":
        with contextlib.suppress(HardpointError):
            registry.load(kind, name)
            if kind == "platform":
                level = registry.platform(name).support_level
                verdict = registry.verdict(kind, name)
    plugin = registry.plugins[index]
    record = plugin.record if plugin.state == "loaded" else None
    return {
        "kind": kind,
        "name": name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "api": None if record is None else ".".join(map(str, record.api)),
        "support_level": level or None,
        "state": plugin.state,
        "available": None if verdict is None else verdict.available,
        "verdict": None if verdict is None else verdict.reason,
        "reason": plugin.reason,
        "summary": "" if record is None else record.summary,
        "entry_point": plugin.entry_point,
        "hooks": list(registry.implemented(plugin)),
    }
