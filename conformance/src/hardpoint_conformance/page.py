"""The certificate as one HTML page that needs no other file: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from textwrap import dedent
from typing import Any

BAD = ("failed", "not run")
MACHINE = {"cores": "{} cores", "python": "Python {}"}
"""What a figure of the machine is written with."""


def page_of(document: Mapping[str, Any]) -> str:
    """Return the page of one certificate, given as plain data."""
    good = bool(document["conformant"])
    style = files("hardpoint_conformance").joinpath("page.css").read_text(encoding="utf-8")
    name = escape(f"{document['kind']} {document['plugin']}")
    verdict = "conformant" if good else "not conformant"
    parts = [
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{name}: {verdict}</title>",
        '<meta name=viewport content="width=device-width, initial-scale=1">',
        f"<style>{style}</style></head><body>",
        f'<main style="--tone: var(--{"good" if good else "bad"})">',
        _head(document, name, verdict),
        _tiles(document["results"]),
        _reasons(document),
        _failures(document["results"]),
        _capabilities(document["capabilities"]),
        _unseen(document["unseen"]),
        _suites(document["results"]),
        _foot(document),
    ]
    return "\n".join(parts)


def _foot(document: Mapping[str, Any]) -> str:
    return (
        f"<footer>Certified {escape(document['time'])} by hardpoint-conformance "
        f"{escape(document['kit'])} in {document['seconds']} s.</footer></main></body></html>"
    )


def _head(document: Mapping[str, Any], name: str, verdict: str) -> str:
    facts = {
        "distribution": f"{document['distribution']} {document['version']}",
        "contract API": f"{document['api']} (core {document['core']}, API {document['core_api']})",
        "executors": ", ".join(document["executors"]),
        "compared with": document["oracle"] or "-",
        "probe": document["probe"],
        "settings": ", ".join(f"{k} = {v}" for k, v in document["settings"].items()) or "none",
        "machine": ", ".join(
            MACHINE.get(key, "{}").format(value) for key, value in document["machine"].items()
        ),
    }
    rows = "".join(
        f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in facts.items()
    )
    sign = "\u2713" if document["conformant"] else "\u2717"
    return f"<header><h1>{name}</h1><p class=verdict>{sign} {verdict}</p><dl>{rows}</dl></header>"


def _tiles(results: Sequence[Mapping[str, Any]]) -> str:
    counts: dict[str, int] = {}
    for result in results:
        counts[result["outcome"]] = counts.get(result["outcome"], 0) + 1
    tiles = "".join(
        f'<div class=tile><b class="{_class(outcome)}">{count}</b>{escape(outcome)}</div>'
        for outcome, count in counts.items()
    )
    return f"<div class=tiles>{tiles}</div>"


def _reasons(document: Mapping[str, Any]) -> str:
    lines = [*document["reasons"], *document["interventions"]]
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>Why, and what to know</h2><ul>{items}</ul>"


def _failures(results: Sequence[Mapping[str, Any]]) -> str:
    bad = [result for result in results if result["outcome"] in BAD]
    if not bad:
        return ""
    items = "".join(
        f"<details open><summary>{_mark(result['outcome'])} {escape(result['suite'])}: "
        f"{_words(result['test'])}</summary><pre>{escape(dedent(result['message']).strip())}</pre></details>"
        for result in bad
    )
    return f"<h2>What failed</h2>{items}"


def _capabilities(lines: Sequence[Mapping[str, Any]]) -> str:
    if not lines:
        return ""
    rows = "".join(
        f"<tr><td>{escape(line['name'])}</td><td>{_mark(line['declared'])}</td>"
        f"<td>{_mark(line['verdict'])}</td>"
        f"<td class='number since'>{escape(line['since'])}</td>"
        f"<td class=number>{sum(line['outcomes'].values()) or ''}</td></tr>"
        for line in lines
    )
    return (
        "<h2>Capabilities</h2><table><tr><th>capability<th>declared<th>verdict"
        f"<th class='number since'>since<th class=number>tests</tr>{rows}</table>"
    )


def _unseen(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>Not seen, and so not certified</h2><ul>{items}</ul>"


def _suites(results: Sequence[Mapping[str, Any]]) -> str:
    names = dict.fromkeys(result["suite"] for result in results)
    parts = []
    for name in names:
        mine = [result for result in results if result["suite"] == name]
        good = sum(result["outcome"] not in BAD for result in mine)
        rows = "".join(
            f"<tr><td>{_words(result['test'])}"
            + (f"<br><small>{escape(result['message'])}</small>"
               if result["message"] and result["outcome"] not in BAD else "")
            + f"</td><td>{_mark(result['outcome'])}</td>"
            f"<td class=number>{result['seconds']:.2f} s</td></tr>"
            for result in mine
        )  # fmt: skip
        parts.append(
            f"<details><summary><b>{escape(name)}</b>: {good} of {len(mine)}</summary>"
            f"<table>{rows}</table></details>"
        )
    return f"<h2>Suites</h2>{''.join(parts)}"


def _mark(word: str) -> str:
    return f'<span class="mark {_class(word)}">{escape(word)}</span>'


def _class(word: str) -> str:
    return word.replace(" ", "-")


def _words(test: str) -> str:
    return escape(test.removeprefix("test_").replace("_", " "))
