"""``hardpoint doctor``: what each platform and executor says of this machine, what would be chosen,
and every effective setting with who set it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from attrs import asdict, evolve

import hardpoint
from hardpoint.cli_options import configuration_options, given_flags
from hardpoint.cli_rehearsal import rehearse
from hardpoint.cli_text import columns, one_line, print_json
from hardpoint.errors import HardpointError, UnsupportedError
from hardpoint.records import Verdict

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.registry import Registry

_OF_THE_MODEL = ("dtype", "kv_cache_dtype")
"""Keys that a platform fills in once it knows the model."""
_OPEN = ("auto", "default")
FIDELITY = "hardpoint_engine.fidelity:measure"


@click.command(
    short_help="Say what a run would use here, and every setting with its origin.",
    context_settings={"max_content_width": 100},
)
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--fidelity",
    is_flag=True,
    help="Run the model on a fixed text, as configured and in float32, and tell how far they are.",
)
@configuration_options
@click.pass_context
def doctor(
    ctx: click.Context, /, name: str | None, as_json: bool, fidelity: bool, **options: Any
) -> None:
    """Say what each platform and executor finds here, what a run with the same flags would use, and
    every setting with its origin. Nothing is started, but for --fidelity.

    With NAME: of that plugin alone, and with exit code 1 if it is not usable here.
    """
    from hardpoint.config.loading import load_config
    from hardpoint.registry import Registry

    config = load_config(
        flags=given_flags(options), file=options["config_file"], sets=options["sets"]
    )
    registry = Registry.discover(config, diagnosis=True)
    report = _report(registry, config) if name is None else _report_on(registry, config, name)
    if fidelity:
        report["fidelity"] = _measured(config)
    if as_json:
        print_json(report)
    else:
        click.echo(_text(report))
    if name is not None and not all(row["available"] for row in _verdicts_of(report)):
        ctx.exit(1)


def _measured(config: Config) -> dict[str, Any]:
    """Return what the engine, which comes with another distribution, measures."""
    from hardpoint.references import resolve

    try:
        measure = resolve(FIDELITY)
    except HardpointError as error:
        raise UnsupportedError(
            "--fidelity", "this installation", reason=str(error),
            hint="Install what runs models: pip install hardpoint-engine",
        ) from None  # fmt: skip
    found: dict[str, Any] = measure(config, tell=lambda line: click.echo(line, err=True))
    return found


def _report(registry: Registry, config: Config) -> dict[str, Any]:
    report = _head()
    for kind in ("platform", "executor"):
        names = dict.fromkeys(p.name for p in registry.plugins if p.kind == kind)
        report[f"{kind}s"] = [_diagnosis(registry, kind, name) for name in names]
    run = rehearse(config, registry)
    parts = ("platform", "executor", "model", "error")
    report["selected"] = {part: getattr(run, part) for part in parts}
    report["remarks"] = list(run.remarks)
    report["listeners"] = None if run.listeners is None else [*map(asdict, run.listeners)]
    report["settings"] = _settings(registry, run.config)
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
    from hardpoint.rpc.shared_memory.inline import why_not_native

    problem = why_not_native()
    return {
        "hardpoint": hardpoint.__version__,
        "api": ".".join(map(str, hardpoint.API)),
        "calls": {"compiled": not problem, "reason": problem},
    }


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


def _settings(registry: Registry, config: Config) -> list[dict[str, Any]]:
    """Return every key, with the plugins' own where a plugin is loaded. What depends on a model
    that is not known stays open.
    """
    from hardpoint.config.resolution import effective

    settings = dict(config.plugins.settings)
    for plugin in registry.plugins:
        raw = settings.get(plugin.name)
        if plugin.state == "loaded" and (raw is None or isinstance(raw, Mapping)):
            own = registry.settings(plugin.kind, plugin.name)
            if own is not None:
                settings[plugin.name] = own
    config = evolve(config, plugins=evolve(config.plugins, settings=settings))
    rows = {path: (value, origin) for path, value, origin in effective(config)}
    if config.description is None:
        rows |= {path: _OPEN for path, (_, who) in rows.items() if _guessed(path, who)}
    return [{"key": path, "value": value, "origin": who} for path, (value, who) in rows.items()]


def _guessed(path: str, origin: str) -> bool:
    return path in _OF_THE_MODEL and origin.startswith("default of platform")


def _verdicts_of(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for kind in ("platform", "executor", "extension"):
        yield from report.get(f"{kind}s", ())


def _text(report: dict[str, Any]) -> str:
    parts = [f"hardpoint {report['hardpoint']}, contract API {report['api']}"]
    if not report["calls"]["compiled"]:
        parts.append(f"Calls run Python code, not compiled: {report['calls']['reason']}")
    for kind in ("platform", "executor", "extension"):
        rows = report.get(f"{kind}s", ())
        if rows:
            parts += [f"{kind}s".capitalize(), columns([*map(_verdict_cells, rows)], indent="  ")]
            parts += [text for row in rows for text in _detail_text(row)]
    if "selected" in report:
        parts.append(_selected_text(report["selected"]))
        parts += [f"Mind: {one_line(remark)}" for remark in report["remarks"]]
        parts += _listening_text(report["listeners"])
    if "fidelity" in report:
        parts.append(_fidelity_text(report["fidelity"]))
    if report["settings"]:
        cells = [(row["key"], _shown(row["value"]), row["origin"]) for row in report["settings"]]
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
    model = "a model, which has to be named (--model)"
    if selected["model"] is not None:
        model = f"model {selected['model']}"
    platform, executor = selected["platform"], selected["executor"]
    return f"A run would use platform {platform}, executor {executor}, {model}."


def _fidelity_text(found: dict[str, Any]) -> str:
    packed = "" if found["quantization"] is None else f", quantization {found['quantization']}"
    return (
        f"Against float32, at {found['places']} places of a text, dtype {found['dtype']}{packed}: "
        f"KL {found['kl']:.3g} nats, the same most likely token at {100 * found['top1']:.1f} %."
    )


def _listening_text(listeners: Sequence[Mapping[str, str]] | None) -> Iterator[str]:
    if listeners is None:
        return
    if not listeners:
        yield "Nothing of it would listen on a network."
        return
    cells = [
        (row["purpose"], row["address"], row["owner"], f"until {row['until']}", row["protection"])
        for row in listeners
    ]
    yield "It would listen at"
    yield columns(cells, indent="  ")


def _shown(value: object) -> str:
    """Return a setting's value for people; what is empty is unset, too."""
    unset = value is None or (isinstance(value, str | tuple | list | Mapping) and not value)
    return "unset" if unset else repr(value)
