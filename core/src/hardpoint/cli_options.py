"""Flags of commands that read the configuration: one for every key, ``--set`` and ``--config``.

Light: a command's help must not load what the command needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from hardpoint.config.keys import KEYS, Key


def configuration_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``command`` with a flag for every configuration key, plus --config and --set."""
    for key in reversed(KEYS):
        if key.flag is not None:
            command = _configuration_option(key)(command)
    command = click.option(
        "--set", "sets", multiple=True, metavar="KEY=VALUE", help="set any key; may be given again"
    )(command)
    return click.option("--config", "config_file", metavar="FILE", help="TOML file with keys")(
        command
    )


def _configuration_option(key: Key) -> Callable[..., Any]:
    name = parameter_name(key)
    flag = str(key.flag)
    if key.type is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=key.help)
    metavar = "|".join(key.choices) or {int: "N", float: "X", tuple: "A,B"}.get(key.type, "TEXT")
    return click.option(flag, name, metavar=metavar, help=key.help)


def parameter_name(key: Key) -> str:
    """Return the name by which click hands over the flag of ``key``."""
    return "key_" + key.path.replace(".", "_")


def given_flags(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration flags that were given: key path -> value."""
    found = {key.path: options.get(parameter_name(key)) for key in KEYS}
    return {path: value for path, value in found.items() if value is not None}
