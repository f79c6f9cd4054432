"""That the model's files are the same on every node with workers: looked at before one starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from hardpoint.checkpoints.fingerprint import difference, fingerprint
from hardpoint.config.problems import config_error, with_origin
from hardpoint.errors import CheckpointError
from hardpoint.records import Problem

if TYPE_CHECKING:
    from hardpoint.config import Config

UNREADABLE = ""
"""Stands in for the files of a model that a node cannot read."""


def files_at(path: str, model_format: str) -> dict[str, str]:
    """Return name -> size and digest of the model's files on this node; where it is not, why. Runs
    in an actor.
    """
    try:
        return fingerprint(Path(path), model_format)
    except CheckpointError as error:
        return {UNREADABLE: str(error)}


def compare(config: Config, far: Mapping[str, Any]) -> None:
    """Compare the driver's files with those of each other node: ``far`` has, by the node's name, an
    actor there that is not at work. Raises ConfigError that names the file and both values.
    """
    description = config.description
    if description is None or not far:
        return
    path = description.path.absolute()
    ours = fingerprint(path, description.format)
    if not ours:  # weights are made up
        return
    asked = [actor.model_files.remote(str(path), description.format) for actor in far.values()]
    problems = [
        Problem(
            key="model",
            value=config.model.model,
            message=message,
            way_out=f"Put the driver's files there, at {path}.",
        )
        for node, theirs in zip(far, ray.get(asked), strict=True)
        if (message := _told(ours, theirs, node))
    ]
    if problems:
        raise config_error([with_origin(each, config.origins) for each in problems])


def _told(ours: Mapping[str, str], theirs: Mapping[str, str], node: str) -> str:
    if UNREADABLE in theirs:
        return f"{node} has not the driver's model: {theirs[UNREADABLE]}."
    found = difference(ours, theirs)
    if found is None:
        return ""
    name, here, there = found
    return f"its file {name} is {here} on the driver's node, and {there} on {node}."
