"""The command line, read off the click commands that are installed."""

from __future__ import annotations

import click
from hardpoint.cli_group import commands
from hardpoint.config.keys import KEYS
from hardpoint_engine.cli.command_options import FORMS, SAMPLING_HELP
from tables import table

_KEYS = {key.flag for key in KEYS} | {"--config", "--set"}
_SAMPLING = {"--" + name.replace("_", "-") for name in (*SAMPLING_HELP, *FORMS)}


def sections() -> str:
    """Return a section for each command and subcommand."""
    context = click.Context(commands, info_name="hardpoint")
    parts = []
    for name in commands.list_commands(context):
        command = commands.get_command(context, name)
        if command is not None:
            parts += _section(command, click.Context(command, info_name=name, parent=context), 2)
    return "\n".join(parts)


def _section(command: click.Command, context: click.Context, level: int) -> list[str]:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    parts = [f"{'#' * level} {context.command_path}\n", f"    {usage}\n", f"{_text(command)}\n"]
    options = [
        each for each in command.params if isinstance(each, click.Option) and not each.hidden
    ]
    own = [each for each in options if not {*each.opts} & (_KEYS | _SAMPLING)]
    if own:
        parts.append(table(("flag", "meaning"), [(_flags(each), each.help or "") for each in own]))
    if any({*each.opts} & _SAMPLING for each in options):
        parts.append("Also a flag for each [sampling parameter](#flags-for-sampling).\n")
    if any("--set" in each.opts for each in options):
        parts.append("Also a flag for each [configuration key](configuration.md#keys).\n")
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None:
                parts += _section(
                    inner, click.Context(inner, info_name=name, parent=context), level + 1
                )
    return parts


def _text(command: click.Command) -> str:
    paragraphs = (command.help or command.short_help or "").replace("\b", "").split("\n\n")
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)


def _flags(option: click.Option) -> str:
    names = " / ".join([*option.opts, *option.secondary_opts])
    value = "" if option.is_flag else f" {option.metavar or option.type.name.upper()}"
    return f"`{names}{value}`"


def sampling() -> str:
    """Return the table of the flags for sampling parameters."""
    rows = [(f"`--{name.replace('_', '-')}`", about) for name, about in SAMPLING_HELP.items()]
    rows += [
        (f"`--{name.replace('_', '-')} {value}`", about) for name, (value, about) in FORMS.items()
    ]
    return table(("flag", "meaning"), rows)
