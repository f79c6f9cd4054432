"""The certificate: who was tested, with what, and what came of it; as plain data."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hardpoint
from attrs import asdict, field, frozen
from hardpoint.capabilities import RESERVED, SINCE, Capability
from hardpoint.errors import HardpointError

from hardpoint_conformance.outcomes import Outcome, Result
from hardpoint_conformance.probe import Probe
from hardpoint_conformance.run import PluginRun, Run

SUITES: Mapping[str, tuple[str, ...]] = {
    "platform": ("plugin", "platform", "worker", "model runner"),
    "executor": ("plugin", "executor"),
}
"""Kind of plugin -> the suites that it must pass."""


@frozen(kw_only=True)
class CapabilityLine:
    """One capability: what the plugin declares (``yes``, ``not yet``, ``never`` or ``undeclared``),
    since which contract number it exists, how many tests came to which outcome, and the verdict:
    ``pass``, ``xfail``, ``never``, ``fail``, ``untested``, or ``reserved`` where the contract has
    nothing but the name.
    """

    name: str
    declared: str
    since: str
    verdict: str
    outcomes: Mapping[str, int]


@frozen(kw_only=True)
class Certificate:
    """One plugin's. ``reasons`` say why it is not conformant; empty if it is. ``unseen`` says what
    was not tested, and what could not be observed: of that it certifies nothing.
    """

    plugin: str
    kind: str
    distribution: str
    version: str
    api: str
    kit: str
    core: str
    core_api: str
    machine: Mapping[str, str]
    time: str
    seconds: float
    executors: Sequence[str]
    settings: Mapping[str, str]
    probe: str
    oracle: str
    capabilities: Sequence[CapabilityLine]
    results: Sequence[Result]
    interventions: Sequence[str]
    unseen: Sequence[str]
    reasons: Sequence[str]
    conformant: bool = field()

    @conformant.default
    def _conformant(self) -> bool:
        return not self.reasons


def certify(run: PluginRun, *, started: float, hooks: Sequence[str] = ()) -> Certificate:
    """Return the certificate of one plugin's tests. ``hooks`` are those of others that could have
    interfered. Raises what loading the plugin raises.
    """
    subject = run.subject
    plugin = subject.plugin
    results = [*run.results, *_not_run(run)]
    interventions = [
        *(f"overridden: {name}" for name in sorted(run.overrides)),
        *(f"hook of another pytest plugin: {name}" for name in hooks),
    ]
    probes = list(dict.fromkeys(type(each.probe) for each in run.subjects))
    lines = _lines(run, results) if plugin.kind == "platform" else []
    return Certificate(
        plugin=subject.name,
        kind=plugin.kind,
        distribution=plugin.distribution,
        version=plugin.version,
        api=_number(plugin.record.api),
        kit=version("hardpoint-conformance"),
        core=hardpoint.__version__,
        core_api=_number(hardpoint.API),
        machine=machine(),
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        seconds=round(time.time() - started, 1),
        executors=sorted({result.executor for result in run.results} - {""}) or ["none"],
        settings=_settings(run),
        probe=", ".join(map(_told, probes)),
        oracle=run.oracle,
        capabilities=lines,
        results=results,
        interventions=interventions,
        unseen=[*_unseen(plugin.kind, probes, lines, results), *sorted(run.believed)],
        reasons=_reasons(run, plugin.kind, results, interventions),
    )


def machine() -> dict[str, str]:
    """Return what this machine is, without its name."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
    }


def as_document(certificate: Certificate) -> dict[str, Any]:
    """Return a certificate as JSON takes it."""

    def plain(_: object, __: object, value: object) -> object:
        return value.value if isinstance(value, Outcome | Capability) else value

    return asdict(certificate, value_serializer=plain)


def write_certificates(path: Path, run: Run, hooks: Sequence[str]) -> None:
    """Write the certificates of a session as one JSON document; a plugin that cannot even be loaded
    has none, and its error instead.
    """
    documents: list[dict[str, Any]] = []
    for (_, name), plugin_run in run.plugins.items():
        try:
            documents.append(as_document(certify(plugin_run, started=run.started, hooks=hooks)))
        except HardpointError as error:
            documents.append({"plugin": name, "conformant": False, "reasons": [str(error)]})
    path.write_text(json.dumps({"certificates": documents}, indent=2))


def _not_run(run: PluginRun) -> list[Result]:
    return [
        Result(
            suite=suite.contract, test=test, outcome=Outcome.NOT_RUN,
            message="it was deselected, skipped, overridden or hidden",
        )
        for suite, test in sorted(run.missing, key=lambda each: (each[0].contract, each[1]))
    ]  # fmt: skip


def _settings(run: PluginRun) -> dict[str, str]:
    """Return key -> value; where suites were adopted with several, all of them."""
    found: dict[str, str] = {}
    for key in dict.fromkeys(key for each in run.subjects for key in each.settings):
        values = [str(each.settings.get(key, "unset")) for each in run.subjects]
        found[key] = " or ".join(dict.fromkeys(values))
    return found


def _told(probe: type[Probe]) -> str:
    """Return a probe's name, and how much it has the kit let pass."""
    name = f"{probe.__module__}:{probe.__qualname__}"
    allowed = probe.logit_tolerance
    return name if allowed is None else f"{name} (logit_tolerance {allowed:g})"


def _lines(run: PluginRun, results: Sequence[Result]) -> list[CapabilityLine]:
    lines = []
    for capability in Capability:
        support = run.subject.support(capability)
        mine = [each.outcome for each in results if each.capability is capability]
        counts = {outcome.value: mine.count(outcome) for outcome in Outcome if outcome in mine}
        lines.append(
            CapabilityLine(
                name=capability.value,
                declared="undeclared" if support is None else support.value,
                since=_number(SINCE[capability]),
                verdict="reserved" if capability in RESERVED else _verdict(mine),
                outcomes=counts,
            )
        )
    return lines


def _unseen(
    kind: str,
    probes: Sequence[type[Probe]],
    lines: Sequence[CapabilityLine],
    results: Sequence[Result],
) -> list[str]:
    """Return what was not tested, in sentences."""
    said = [
        f"{line.name}: no part of contract {_number(hardpoint.API)}, which reserves the name and "
        "says nothing of it"
        for line in lines if line.verdict == "reserved"
    ]  # fmt: skip
    said += [
        f"{line.name} (declared {line.declared}): untested" for line in lines
        if line.verdict == "untested" and not line.outcomes
    ]  # fmt: skip
    if kind == "platform" and any(probe.held_bytes is Probe.held_bytes for probe in probes):
        said.append(
            "device memory that sleep and shutdown give back: untested, as the probe has no "
            "held_bytes; the worker's own reports were believed, and of shutdown only processes, "
            "threads, open files and the driver's own memory were seen"
        )
    skipped = [each for each in results if each.outcome is Outcome.NOT_APPLICABLE]
    return [*said, *(f"{each.suite}: {each.test}: {each.message}" for each in skipped)]


def _verdict(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return "untested"
    if not all(outcome.good for outcome in outcomes):
        return "fail"
    words = {Outcome.PASSED: "pass", Outcome.NOT_YET: "xfail", Outcome.NEVER: "never"}
    return next((word for outcome, word in words.items() if outcome in outcomes), "untested")


def _reasons(
    run: PluginRun, kind: str, results: Sequence[Result], interventions: Sequence[str]
) -> list[str]:
    adopted = {suite.contract for suite in run.suites}
    reasons = [f"suite {name!r} was not adopted" for name in SUITES[kind] if name not in adopted]
    for outcome, word in ((Outcome.FAILED, "failed"), (Outcome.NOT_RUN, "did not run")):
        count = sum(each.outcome is outcome for each in results)
        if count:
            reasons.append(f"{count} {'tests' if count > 1 else 'test'} {word}")
    return [*reasons, *(each for each in interventions if each.startswith("overridden"))]


def _number(api: tuple[int, int]) -> str:
    return ".".join(map(str, api))
