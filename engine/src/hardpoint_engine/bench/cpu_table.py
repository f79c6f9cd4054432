"""The figures of ``hardpoint bench cpu`` for people: a table and, if asked for, a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hardpoint_engine.bench.cpu_bounds import case_name

Row = Mapping[str, Any]


def table(document: Mapping[str, Any]) -> str:
    """Return the document as text: tokens a second, ratios, bounds, what was left out."""
    return "\n".join(_lines(document))


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    rows: Sequence[Row] = document["rows"]
    cases = list(dict.fromkeys((row["phase"], row["batch"]) for row in rows))
    head = "".join(f"{case_name(*case):>14}" for case in cases)
    yield f"{'tokens/s':30}{head}"
    for engine, kind in dict.fromkeys((row["engine"], row["format"]) for row in rows):
        found = {
            (row["phase"], row["batch"]): row["tokens_per_s"]
            for row in rows if (row["engine"], row["format"]) == (engine, kind)
        }  # fmt: skip
        cells = "".join(f"{found[each]:14.1f}" if each in found else f"{'-':>14}" for each in cases)
        yield f"{engine:16}{kind:14}{cells}"
    yield ""
    for each in document["ratios"]:
        if "bound" not in each:
            case = case_name(each["phase"], each["batch"])
            where = f"{each['format']} / {each['against']}, {case}"
            yield f"{where:44}{each['ratio']:>10.2f}"
    for kind, figures in document["figures"].items():
        yield f"{kind:14}" + "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
    yield ""
    for each in document["bounds"]:
        judged = f"bound {each['bound']:<8g}{_verdict(each)}"
        yield f"{each['name']:44}{_number(each['value'])}  {judged}"
    yield f"{'memory is read at':44}{document['read_bytes_per_s'] / 1e9:>10.1f} GB/s"
    for each in document["once"]:
        yield f"one turn only: {each['name']}, {each['case']}: {each['why']}"
    if document["cut"] is not None:
        yield f"cut short by {document['cut']}: {document['turns']} turns of all"
    for name, why in document["skipped"].items():
        yield f"left out: {name}: {why}"


def _number(value: float | None) -> str:
    return f"{'-':>10}" if value is None else f"{value:>10.3f}"


def _verdict(bound: Row) -> str:
    return {True: "met", False: "NOT MET", None: "not measured"}[bound["met"]]


def plot(document: Mapping[str, Any], path: str, pyplot: Any) -> None:
    """Draw a bar for each engine and format, a panel for each case, into ``path``."""
    rows: Sequence[Row] = document["rows"]
    cases = list(dict.fromkeys((row["phase"], row["batch"]) for row in rows))
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    figure, panels = pyplot.subplots(
        1, len(cases), squeeze=False, figsize=(3.4 * len(cases), 0.3 * len(rows) / len(cases) + 1.6)
    )
    for panel, case in zip(panels[0], cases, strict=True):
        here = [row for row in rows if (row["phase"], row["batch"]) == case][::-1]
        panel.barh(
            [f"{row['engine']} {row['format']}" for row in here],
            [row["tokens_per_s"] for row in here],
            color=[f"C{engines.index(row['engine'])}" for row in here],
        )
        panel.set(title=case_name(*case), xlabel="tokens a second")
    figure.suptitle(f"at {rows[0]['at']}, {document['cores']} cores")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
