"""Makes mutants installed plugins: a folder for ``sys.path`` with metadata and light modules."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hardpoint.executor import Executor
from hardpoint.model_runner import ModelRunner
from hardpoint.platform import Platform
from hardpoint.worker import Worker
from mutation import Mutation

PLATFORM_PLUGIN = """
from hardpoint.hookspecs import hookimpl
from hardpoint.records import PlatformRecord

@hookimpl
def hardpoint_platform():
    return PlatformRecord(
        name="{name}", api=(2, 0), platform="mutant_platforms.{module}:Mutant",
        settings="{settings}", summary="a mutant",
    )
"""
EXECUTOR_PLUGIN = """
from hardpoint.hookspecs import hookimpl
from hardpoint.records import ExecutorRecord

@hookimpl
def hardpoint_executor():
    return ExecutorRecord(name="{name}", api=(2, 0), executor="{reference}", summary="a mutant")
"""
PLATFORM = """
from hardpoint.capabilities import NOT_YET, Capability
from {base_module} import {base} as Base

class Mutant(Base):
    name = "{name}"
{line}
"""
THROUGH_TORCH = """
    capabilities = {**Base.capabilities, Capability.BATCH_INVARIANCE: NOT_YET}
"""
"""Of the cpu platform with another runner than its own, which has no native programs."""
DUMMY = ("hardpoint_dummy.platform", "DummyPlatform", "hardpoint_dummy.settings:DummySettings")
CPU = ("hardpoint_cpu.platform", "CpuPlatform", "hardpoint_cpu.settings:CpuSettings")
PROBE = """
from hardpoint_conformance.dummy_probe import DummyProbe

class MutantProbe(DummyProbe):
    platform = "mutant_platforms.{module}:Mutant"

    def tracing(self, folder):
        return {{"plugins.{name}.trace_folder": folder}}
"""
COMPARED_WITH_NUMPY = """
    def oracle(self, description):
        from broken_adapters import Reference

        return Reference(description)
"""


def write_site(folder: Path, mutations: Iterable[Mutation]) -> None:
    """Write the distribution ``hardpoint-mutants`` into ``folder``."""
    groups: dict[str, list[str]] = {"platforms": [], "executors": [], "conformance": []}
    for part in ("mutant_plugins", "mutant_platforms", "mutant_probes"):
        (folder / part).mkdir()
        (folder / part / "__init__.py").touch()
    for mutation in mutations:
        module = mutation.module
        text, platform = plugin_text(mutation)
        (folder / "mutant_plugins" / f"{module}.py").write_text(text)
        (folder / "mutant_platforms" / f"{module}.py").write_text(platform)
        group = "executors" if mutation.suite == "ExecutorSuite" else "platforms"
        groups[group].append(f"{mutation.name} = mutant_plugins.{module}")
        if group == "platforms" and base_of(mutation) is DUMMY:
            probe = PROBE.format(name=mutation.name, module=module)
            probe += COMPARED_WITH_NUMPY if getattr(mutation.of, "numpy", False) else ""
            (folder / "mutant_probes" / f"{module}.py").write_text(probe)
            groups["conformance"].append(f"{mutation.name} = mutant_probes.{module}:MutantProbe")
    info = folder / "hardpoint_mutants-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: hardpoint-mutants\nVersion: 1.0\n"
        "Requires-Dist: hardpoint>=0.1,<0.2\n"
    )
    (info / "entry_points.txt").write_text(
        "".join(
            f"[hardpoint.{group}]\n" + "\n".join(lines) + "\n" for group, lines in groups.items()
        )
    )


def base_of(mutation: Mutation) -> tuple[str, str, str]:
    """Return module, class and settings of the platform that a mutant is a variant of."""
    bases = [base.__module__ for base in getattr(mutation.of, "__mro__", ())]
    return CPU if any(name.startswith("hardpoint_runtime.") for name in bases) else DUMMY


def plugin_text(mutation: Mutation) -> tuple[str, str]:
    """Return the text of a mutant's light module and of its platform's."""
    name, module, kind = mutation.name, mutation.module, mutation.of
    ordinary = PLATFORM_PLUGIN.format(name=name, module=module, settings=base_of(mutation)[2])
    if isinstance(kind, str):
        text = kind.replace("ORDINARY", ordinary.strip()).replace("NAME", name)
        return text.replace("MODULE", module), _platform(mutation, "")
    reference = f"{kind.__module__}:{kind.__name__}"
    if issubclass(kind, Executor):
        return EXECUTOR_PLUGIN.format(name=name, reference=reference), ""
    if issubclass(kind, Platform):
        return ordinary, _platform(mutation, "")
    part = {Worker: "worker_class", ModelRunner: "model_runner_class"}
    attribute = next(part[each] for each in part if issubclass(kind, each))
    line = f'    {attribute} = "{reference}"'
    if base_of(mutation) is CPU and issubclass(kind, ModelRunner):
        line += THROUGH_TORCH
    return ordinary, _platform(mutation, line)


def _platform(mutation: Mutation, line: str) -> str:
    module, base, _ = base_of(mutation)
    if isinstance(mutation.of, type) and issubclass(mutation.of, Platform):
        module, base = mutation.of.__module__, mutation.of.__name__
    return PLATFORM.format(base_module=module, base=base, name=mutation.name, line=line)
