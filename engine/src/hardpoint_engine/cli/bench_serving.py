"""``hardpoint bench latency`` and ``hardpoint bench throughput``, carried out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from attrs import evolve
from hardpoint.errors import HardpointError

from hardpoint_engine.bench import serving, table
from hardpoint_engine.cli.starting import (
    configuration,
    executor_name,
    local_error,
    log_to_standard_error,
    tell,
    tell_choice,
)
from hardpoint_engine.llm import LLM

PLANS = {"latency": serving.LATENCY, "throughput": serving.THROUGHPUT}


def run(
    name: str,
    options: Mapping[str, Any],
    *,
    counts: tuple[int, ...] | None,
    numbers: Mapping[str, int | None],
    as_json: bool,
    plot_path: str | None,
) -> None:
    """Measure and print. ``numbers`` are fields of the plan, None for its own."""
    given: dict[str, Any] = {key: value for key, value in numbers.items() if value is not None}
    plan = evolve(PLANS[name], **given)
    if counts is not None:
        plan = evolve(plan, counts=counts)
    pyplot = None
    if plot_path is not None:
        if not Path(plot_path).absolute().parent.is_dir():
            raise click.BadParameter(f"there is no folder for {plot_path}", param_hint="--plot")
        pyplot = table.plotting()
    config = configuration(options)
    log_to_standard_error(config)
    try:
        with LLM.from_config(config, chosen=tell_choice) as llm:
            told = tell if as_json else click.echo
            document = serving.measure(llm, plan, name, told)
            document["executor"] = executor_name(llm.config, llm.platform)
    except HardpointError as error:
        raise local_error(error) from None
    if as_json:
        click.echo(json.dumps(document))
    if plot_path is not None:
        serving.plot(document, plot_path, pyplot)
