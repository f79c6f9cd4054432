"""``hardpoint conformance``: certifies one plugin, without any file of its author's."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from hardpoint.cli_text import columns, print_json

if TYPE_CHECKING:
    from hardpoint.discovery import Plugin

USAGE = 2


@click.command()
@click.argument("name")
@click.option("--executor", metavar="NAME", help="Executor that runs a platform's workers.")
@click.option(
    "--set", "settings", metavar="KEY=VALUE", multiple=True,
    help="A configuration key, such as plugins.acme.backend=cpu; may be repeated.",
)  # fmt: skip
@click.option("--kind", type=click.Choice(["platform", "executor"]), help="Where both have NAME.")
@click.option("--json", "as_json", is_flag=True, help="Print the certificate as JSON.")
@click.option(
    "--html", "page", type=click.Path(dir_okay=False, path_type=Path),
    help="Write the certificate as a page that needs no other file.",
)  # fmt: skip
def conformance(
    name: str,
    executor: str | None,
    settings: Sequence[str],
    kind: str | None,
    as_json: bool,
    page: Path | None,
) -> int:
    """Certify the platform or executor NAME.

    Runs every suite that the plugin needs and prints a certificate: what it declares, what was
    seen, and on what. Ends with 0 only if the plugin is conformant.
    """
    from hardpoint_conformance.certification import certified

    plugin = _plugin(name, kind)
    if executor is not None:
        _plugin(executor, "executor")
    keys = dict(_key_value(text) for text in settings)
    if page is not None and not page.absolute().parent.is_dir():
        raise click.UsageError(f"--html {page}: there is no folder {page.absolute().parent}")
    document = certified(plugin, executor, keys, watch=None if as_json else _progress)
    if page is not None:
        from hardpoint_conformance.page import page_of

        page.write_text(page_of(document), encoding="utf-8")
    if as_json:
        print_json(document)
    else:
        _print(document, page)
    return 0 if document["conformant"] else 1


def _plugin(name: str, kind: str | None) -> Plugin:
    """Return the plugin, not loaded; raise UsageError where there is none, with close matches, or
    two, and CertificationError where it cannot be loaded.
    """
    from hardpoint.registry import Registry
    from hardpoint.suggestions import did_you_mean

    from hardpoint_conformance.certification import CertificationError
    from hardpoint_conformance.contract import ContractError
    from hardpoint_conformance.fresh_process import ask

    registry = Registry.discover()
    kinds = [kind] if kind else ["platform", "executor"]
    found = [each for each in kinds if registry.has(each, name)]
    if len(found) > 1:
        raise click.UsageError(f"{name!r} is a platform and an executor; choose by --kind")
    if not found:
        known = [each for one in kinds for each in registry.names(one)]
        told = (f"no {' or '.join(kinds)} {name!r} is installed.", did_you_mean(name, known),
                f"Installed: {', '.join(known) or 'none'}.")  # fmt: skip
        raise click.UsageError(" ".join(filter(None, told)))
    try:  # not here: what ends the process that imports it must not end this one
        failure = ask("imported", found[0], name)["error"]
    except ContractError as error:
        failure = f"{found[0]} {name!r} cannot be loaded:{error}"
    if failure:
        raise CertificationError(failure)
    return next(each for each in registry.plugins if (each.kind, each.name) == (found[0], name))


def _key_value(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise click.UsageError(f"--set {text!r} must be KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{line[:100]}", err=True, nl=False)


def _print(document: dict[str, Any], page: Path | None) -> None:
    """Write the certificate for people."""
    if sys.stderr.isatty():
        click.echo("\r\x1b[K", err=True, nl=False)
    head = f"{document['kind']} {document['plugin']}"
    click.echo(f"{head}  ({document['distribution']} {document['version']}, contract API "
               f"{document['api']}, kit {document['kit']})\n")  # fmt: skip
    rows = [("CAPABILITY", "DECLARED", "VERDICT", "TESTS")]
    for line in document["capabilities"]:
        tests = ", ".join(f"{count} {outcome}" for outcome, count in line["outcomes"].items())
        rows.append((line["name"], line["declared"], line["verdict"], tests or "-"))
    if len(rows) > 1:
        click.echo(columns(rows, indent="  ") + "\n")
    counts: dict[str, int] = {}
    for result in document["results"]:
        counts[result["outcome"]] = counts.get(result["outcome"], 0) + 1
    click.echo("  " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    compared = f"; compared with {document['oracle']}" if document["oracle"] else ""
    click.echo(f"  on {', '.join(document['executors'])}, {document['seconds']} s{compared}")
    for result in document["results"]:
        if result["outcome"] in ("failed", "not run"):
            click.echo(f"\n  {result['suite']}: {result['test']}: {result['outcome']}")
            click.echo("    " + result["message"].strip("\n").replace("\n", "\n    "))
    for line in document["interventions"]:
        click.echo(f"  {line}")
    if document["unseen"]:
        click.echo("\n  not seen, and so not certified:")
    for line in document["unseen"]:
        click.echo(f"    {line}")
    if page is not None:
        click.echo(f"  {page}")
    click.echo("\nconformant" if document["conformant"] else "\nNOT conformant: "
               + "; ".join(document["reasons"]))  # fmt: skip
