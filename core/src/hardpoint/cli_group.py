"""The subcommands: ``plugins`` and ``doctor`` here, the others by entry point."""

from __future__ import annotations

from collections.abc import Mapping

import click

import hardpoint
from hardpoint import discovery
from hardpoint.cli_doctor import doctor
from hardpoint.cli_plugins import plugins
from hardpoint.discovery import Plugin
from hardpoint.errors import PluginConflictError, PluginLoadError
from hardpoint.references import WrongClassError, resolve
from hardpoint.suggestions import did_you_mean

SUMMARY = 100
"""Characters of a command's summary on the help page, which wraps it."""


class CommandGroup(click.Group):
    """Lists the installed commands by their metadata; imports the one that is run, and all for the
    help page, which shows their summaries.
    """

    def installed(self, ctx: click.Context) -> Mapping[str, Plugin]:
        """Return name -> command, from entry points of ``hardpoint.commands``; read once a run."""
        found: dict[str, Plugin] | None = ctx.meta.get(__name__)
        if found is None:
            entries = (each for each in discovery.find() if each.kind == "command")
            found = {plugin.name: plugin for plugin in discovery.judge(entries)}
            ctx.meta[__name__] = found
        return found

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all names; called by click for the help page."""
        return sorted({*super().list_commands(ctx), *self.installed(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, importing it; called by click for the one that was typed.

        Raises PluginLoadError naming the distribution, and UsageError with close matches.
        """
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        installed = self.installed(ctx)
        if cmd_name in installed:
            return _load(installed[cmd_name])
        hint = did_you_mean(cmd_name, self.list_commands(ctx))
        known = ", ".join(self.list_commands(ctx))
        raise click.UsageError(f"no such command: {cmd_name}. {hint} Commands: {known}.", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help page's list. Of a command that cannot be loaded it names the provider."""
        rows = {name: _summary(command) for name, command in self.commands.items()}
        for name, plugin in self.installed(ctx).items():
            rows.setdefault(name, _summary_of(plugin))
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows.items()))


def _load(plugin: Plugin) -> click.Command:
    if plugin.state == "conflict":
        raise PluginConflictError(plugin.reason)
    try:
        discovery.check_requirement(plugin)
        command = resolve(plugin.entry_point)
    except ImportError as error:
        raise PluginLoadError(f"{plugin.label} cannot be loaded: {error}") from error
    if not isinstance(command, click.Command):
        raise WrongClassError(f"{plugin.label} leads to {command!r}, which is not a click command")
    return command


def _summary(command: click.Command) -> str:
    return command.get_short_help_str(limit=SUMMARY)


def _summary_of(plugin: Plugin) -> str:
    try:
        return _summary(_load(plugin)) or f"from {plugin.provider}"
    except (Exception, SystemExit):  # noqa: BLE001 - running it tells what is wrong
        return f"from {plugin.provider}, which cannot be loaded"


_API = ".".join(map(str, hardpoint.API))


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hardpoint.__version__, message=f"hardpoint %(version)s (contract API {_API})")
def commands() -> None:
    """Run language models on whatever hardware is hung on Hardpoint."""


commands.add_command(plugins)
commands.add_command(doctor)
