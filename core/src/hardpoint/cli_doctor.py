"""``hardpoint doctor``: what each platform and executor says of this machine, what would be chosen,
and every effective setting with who set it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
from attrs import evolve

import hardpoint
from hardpoint.cli_text import columns, one_line, print_json
from hardpoint.errors import HardpointError
from hardpoint.records import Verdict

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.registry import Registry

_OF_THE_MODEL = ("dtype", "kv_cache_dtype")
"""Keys that a platform fills in once it knows the model."""


@click.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--config", "file", metavar="FILE.toml", help="Configuration file.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Set any key.")
@click.option("--platform", help="Ask as if this platform were named.")
@click.option("--executor", help="Ask as if this executor were named.")
@click.pass_context
def doctor(
    ctx: click.Context,
    name: str | None,
    as_json: bool,
    file: str | None,
    sets: tuple[str, ...],
    platform: str | None,
    executor: str | None,
) -> None:
    """Say what each platform and executor finds here, and every setting with its origin.

    With NAME: of that plugin alone, and with exit code 1 if it is not usable here.
    """
    from hardpoint.config.loading import load_config
    from hardpoint.registry import Registry

    flags = {"platform": platform, "executor": executor}
    config = load_config(flags=flags, file=file, sets=sets)
    registry = Registry.discover(config)
    report = _report(registry, config) if name is None else _report_on(registry, config, name)
    if as_json:
        print_json(report)
    else:
        click.echo(_text(report))
    if name is not None and not all(row["available"] for row in _verdicts_of(report)):
        ctx.exit(1)


def _report(registry: Registry, config: Config) -> dict[str, Any]:
    report = _head()
    for kind in ("platform", "executor"):
        names = dict.fromkeys(p.name for p in registry.plugins if p.kind == kind)
        report[f"{kind}s"] = [_diagnosis(registry, kind, name) for name in names]
    report["selected"] = _selected(registry, config)
    chosen = report["selected"]["platform"] if report["selected"]["error"] is None else None
    report["settings"] = _settings(registry, config, chosen)
    return report


def _report_on(registry: Registry, config: Config, name: str) -> dict[str, Any]:
    """Return the report on the plugins called ``name``; no other one is loaded."""
    from hardpoint.suggestions import not_found

    kinds = [p.kind for p in registry.plugins if p.name == name and p.kind != "command"]
    if not kinds:
        raise not_found("plugin", name, registry.plugins)
    report = _head()
    for kind in dict.fromkeys(kinds):
        report[f"{kind}s"] = [_diagnosis(registry, kind, name) | _details(registry, kind, name)]
    prefix = f"plugins.{name}."
    settings = _settings(registry, config)
    report["settings"] = [row for row in settings if row["key"].startswith(prefix)]
    return report


def _head() -> dict[str, Any]:
    return {"hardpoint": hardpoint.__version__, "api": ".".join(map(str, hardpoint.API))}


def _diagnosis(registry: Registry, kind: str, name: str) -> dict[str, Any]:
    try:
        if name not in registry.names(kind):
            verdict = Verdict(available=False, reason="disabled: named in plugins.disable")
        elif kind == "extension":
            registry.load(kind, name)
            verdict = Verdict(available=True, reason="loaded")
        else:
            verdict = registry.verdict(kind, name, named=True)
    except HardpointError as error:
        verdict = Verdict(available=False, reason=str(error))
    return {
        "name": name,
        "available": verdict.available,
        "priority": verdict.priority,
        "reason": verdict.reason,
        "devices": [
            {"id": device.id, "name": device.name, "memory_bytes": device.memory_bytes}
            for device in verdict.devices
        ],
    }


def _details(registry: Registry, kind: str, name: str) -> dict[str, Any]:
    plugin = next(p for p in registry.plugins if (p.kind, p.name) == (kind, name))
    details: dict[str, Any] = {
        "distribution": plugin.distribution,
        "version": plugin.version,
        "entry_point": plugin.entry_point,
        "state": plugin.state,
        "hooks": list(registry.implemented(plugin)),
    }
    if plugin.state == "loaded":
        details["plugin_api"] = ".".join(map(str, plugin.record.api))
        if kind == "platform":
            platform = registry.platform(name)
            details["support_level"] = platform.support_level
            answers = platform.capabilities.items()
            details["capabilities"] = {each.value: answer.value for each, answer in answers}
    return details


def _selected(registry: Registry, config: Config) -> dict[str, Any]:
    """Return what a run would choose, or the error with which it would end."""
    from hardpoint.selection import select_executor, select_platform

    selected: dict[str, Any] = {"platform": None, "executor": None, "error": None}
    try:
        platform = select_platform(registry, config)
        selected["platform"] = platform.name
        platform.limits(config)
        executor = select_executor(registry, config, platform)
    except HardpointError as error:
        return {**selected, "error": str(error)}
    except Exception as error:  # noqa: BLE001 - a diagnosis ends in words
        return {**selected, "error": f"{type(error).__name__}: {error}"}
    named = next((p.name for p in registry.used("executor")), None)
    return {**selected, "executor": named or f"{executor.__module__}:{executor.__qualname__}"}


def _settings(
    registry: Registry, config: Config, platform: str | None = None
) -> list[dict[str, Any]]:
    """Return every key, with the plugins' own where a plugin is loaded, and with what ``platform``
    fills in. What depends on the model stays open.
    """
    from hardpoint.config.resolution import effective, fill_defaults

    settings = dict(config.plugins.settings)
    for plugin in registry.plugins:
        if plugin.state == "loaded":
            own = registry.settings(plugin.kind, plugin.name)
            if own is not None:
                settings[plugin.name] = own
    config = evolve(config, plugins=evolve(config.plugins, settings=settings))
    rows = {path: (value, origin) for path, value, origin in effective(config)}
    if platform is not None:
        filled = effective(fill_defaults(config, registry.platform(platform)))
        kept = {path: rows[path] for path in rows if path in _OF_THE_MODEL}
        rows = {path: (value, origin) for path, value, origin in filled} | kept
    return [{"key": path, "value": value, "origin": who} for path, (value, who) in rows.items()]


def _verdicts_of(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for kind in ("platform", "executor", "extension"):
        yield from report.get(f"{kind}s", ())


def _text(report: dict[str, Any]) -> str:
    parts = [f"hardpoint {report['hardpoint']}, contract API {report['api']}"]
    for kind in ("platform", "executor", "extension"):
        rows = report.get(f"{kind}s", ())
        if rows:
            parts += [f"{kind}s".capitalize(), columns([*map(_verdict_cells, rows)], indent="  ")]
            parts += [text for row in rows for text in _detail_text(row)]
    if "selected" in report:
        parts.append(_selected_text(report["selected"]))
    if report["settings"]:
        cells = [(row["key"], repr(row["value"]), row["origin"]) for row in report["settings"]]
        parts += ["Settings", columns(cells, indent="  ")]
    return "\n".join(parts)


def _verdict_cells(row: dict[str, Any]) -> tuple[str, str, str]:
    answer = "unavailable"
    if row["available"]:
        answer = "only by name" if row["priority"] < 0 else "available"
    return row["name"], answer, one_line(row["reason"])


def _detail_text(row: dict[str, Any]) -> Iterator[str]:
    devices = [(device["id"], device["name"]) for device in row["devices"]]
    if devices:
        yield columns(devices, indent=f"    {row['name']} device ")
    if "distribution" in row:
        yield f"    from {row['distribution']} {row['version']} ({row['entry_point']})"
    if "plugin_api" in row:
        yield f"    built for contract API {row['plugin_api']}; hooks: {', '.join(row['hooks'])}"
    if "capabilities" in row:
        cells = list(row["capabilities"].items())
        yield f"    support level {row['support_level']}; capabilities:"
        yield columns(cells, indent="      ")


def _selected_text(selected: dict[str, Any]) -> str:
    if selected["error"] is not None:
        return f"A run would end with: {selected['error']}"
    return f"A run would use platform {selected['platform']}, executor {selected['executor']}."
