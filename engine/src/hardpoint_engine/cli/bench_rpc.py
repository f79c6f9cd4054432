"""``hardpoint bench rpc``, carried out."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from attrs import evolve

from hardpoint_engine.bench import checks as check_stages
from hardpoint_engine.bench import rpc, table
from hardpoint_engine.bench.bounds import bounds
from hardpoint_engine.bench.driver import FILES
from hardpoint_engine.cli.peers import interpreters

PEERS = {"vllm": ("vllm-mq",), "ray": ("ray", "ray-graph")}
"""Peer -> its transports."""


def run(
    *,
    quick: bool,
    as_json: bool,
    plot_path: str | None,
    workers: str | None,
    transports: Sequence[str],
    checks: bool,
    peers: Sequence[str],
) -> None:
    """Measure and print. Raises HardpointError, and click's errors for a wrong option."""
    plan = evolve(rpc.QUICK if quick else rpc.RpcPlan(), pythons=_pythons(peers))
    if workers is not None:
        plan = evolve(plan, workers=_numbers(workers))
    if transports:
        plan = evolve(plan, transports=_known(transports))
    pyplot = None
    if plot_path is not None:
        if not Path(plot_path).absolute().parent.is_dir():
            raise click.BadParameter(f"there is no folder for {plot_path}", param_hint="--plot")
        pyplot = table.plotting()
    document = measure(plan, quick=quick, checks=checks)
    click.echo(json.dumps(document) if as_json else table.table(document))
    if plot_path is not None:
        table.plot(document, plot_path, pyplot)


def measure(plan: rpc.RpcPlan, *, quick: bool, checks: bool) -> dict[str, Any]:
    """Return the whole document: ``rows``, ``idle``, ``checks``."""
    document = rpc.measure(plan, _tell)
    left_out = document.pop("left_out")
    cores = len(os.sched_getaffinity(0))
    found: dict[str, Any] = {"cores": cores, "load": os.getloadavg()[0], "left_out": left_out}
    if checks:
        stages = check_stages.QUICK_CHECKS if quick else check_stages.CheckPlan()
        figures = check_stages.measure_checks(stages, _tell)
        left_out |= figures.pop("left_out")
        found |= figures
    document["checks"] = found
    found["bounds"] = bounds(document)
    return document


def _pythons(peers: Sequence[str]) -> dict[str, str]:
    """Return transport -> interpreter."""
    named = interpreters(peers, PEERS)
    return {each: python for peer, python in named.items() for each in PEERS[peer]}


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) if part.strip().isdigit() else 0 for part in text.split(","))
    if not all(numbers):
        raise click.BadParameter(f"numbers of workers, not {text!r}", param_hint="--workers")
    return numbers


def _known(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in FILES:
            known = ", ".join(FILES)
            raise click.BadParameter(f"{name!r} is none of {known}", param_hint="--transport")
    return tuple(names)


def _tell(line: str) -> None:
    click.echo(f"hardpoint: {line}", err=True)
