"""``hardpoint bench cpu``, carried out."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from hardpoint.default_model import find_default_model

from hardpoint_engine.bench import cpu, cpu_table, table
from hardpoint_engine.bench.model_files import ModelFiles
from hardpoint_engine.cli.interruption import SIGNALS, Interrupted, interruptions
from hardpoint_engine.cli.peers import interpreters

IN_THIS = ("transformers",)
"""Peers that run in this interpreter if no other is named and it has them."""


def run(
    *,
    model: str | None,
    folder: str | None,
    formats: str | None,
    cases: str | None,
    repeats: int,
    threads: int,
    minutes: float | None,
    peers: Sequence[str],
    compiled: bool,
    as_json: bool,
    plot_path: str | None,
) -> None:
    """Measure and print. Raises HardpointError, and click's errors for a wrong option; Interrupted
    after a signal, what was measured until then being printed.
    """
    plan = cpu.CpuPlan(
        formats=_names(formats, cpu.DEFAULT_FORMATS, cpu.FORMATS, "--formats"),
        cases=_names(cases, tuple(cpu.CASES), tuple(cpu.CASES), "--cases"),
        repeats=repeats,
        threads=threads,
        minutes=minutes,
        peers=_pythons(peers),
        compiled=compiled,
    )
    pyplot = None
    if plot_path is not None:
        if not Path(plot_path).absolute().parent.is_dir():
            raise click.BadParameter(f"there is no folder for {plot_path}", param_hint="--plot")
        pyplot = table.plotting()
    source = Path(model) if model else find_default_model()
    if source is None or source.suffix != ".gguf":
        raise click.BadParameter("name a GGUF file to make the others of", param_hint="--model")
    with interruptions(), tempfile.TemporaryDirectory(prefix="hardpoint-bench-") as own:
        document = cpu.measure(plan, ModelFiles(source, Path(folder or own), _tell), _tell)
    document |= {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    click.echo(json.dumps(document) if as_json else cpu_table.table(document))
    if plot_path is not None:
        cpu_table.plot(document, plot_path, pyplot)
    numbers = {each.name: each for each in SIGNALS}
    if document["cut"] in numbers:
        raise Interrupted(numbers[document["cut"]])


def _names(
    text: str | None, default: Sequence[str], known: Sequence[str], hint: str
) -> tuple[str, ...]:
    names = tuple(default) if text is None else tuple(each.strip() for each in text.split(","))
    for name in names:
        if name not in known:
            raise click.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint=hint)
    return names


def _pythons(peers: Sequence[str]) -> dict[str, str]:
    """Return peer -> interpreter."""
    found = {name: sys.executable for name in IN_THIS if importlib.util.find_spec(name)}
    others = [name for name in cpu.ENGINES if name != cpu.OURS]
    return found | interpreters(peers, others)


def _tell(line: Any) -> None:
    click.echo(f"hardpoint: {line}", err=True)
