"""The figures of ``hardpoint bench rpc`` for people: a table and, if asked for, a picture."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hardpoint.errors import UnsupportedError

EXTRA = "hardpoint-engine[bench]"
Row = Mapping[str, Any]


def size_name(size: int) -> str:
    """Return a number of bytes as people say it."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def table(document: Mapping[str, Any]) -> str:
    """Return the document as text: medians by workers, idle shares, checks, bounds."""
    return "\n".join(_lines(document))


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    rows: Sequence[Row] = document["rows"]
    counts = list(dict.fromkeys(row["workers"] for row in rows))
    head = "".join(f"{f'N={count}':>22}" for count in counts)
    yield f"{'µs a call: median / p99':40}{head}"
    for size, mode in dict.fromkeys((row["bytes"], row["mode"]) for row in rows):
        here = [row for row in rows if (row["bytes"], row["mode"]) == (size, mode)]
        for name in dict.fromkeys(row["transport"] for row in here):
            found = {row["workers"]: row for row in here if row["transport"] == name}
            cells = "".join(f"{_cell(found.get(count)):>22}" for count in counts)
            yield f"{size_name(size):8}{mode:10}{name:22}{cells}"
    yield ""
    yield "% of a core used by all its processes, from 5 ms after the last call"
    for name in dict.fromkeys(row["transport"] for row in document["idle"]):
        shares = {
            row["workers"]: row["cpu_share"]
            for row in document["idle"] if row["transport"] == name
        }  # fmt: skip
        cells = "".join(
            f"{100 * shares[count]:22.3f}" if count in shares else f"{'-':>22}" for count in counts
        )
        yield f"{'':18}{name:22}{cells}"
    yield ""
    checks = document["checks"]
    yield from (
        f"{name:40}{value:>22g}" for name, value in checks.items() if isinstance(value, float)
    )
    for name, why in checks["left_out"].items():
        yield f"left out: {name}: {why}"
    yield ""
    for each in checks["bounds"]:
        verdict = "met" if each["met"] else "NOT MET"
        yield f"{each['name']:44}{each['value']:>10.4g}  at most {each['bound']:<8.4g}{verdict}"


def _cell(row: Row | None) -> str:
    return "-" if row is None else f"{row['median_us']:.1f} / {row['p99_us']:.1f}"


def plotting() -> Any:
    """Return matplotlib's ``pyplot``, set to draw without a screen.

    Called before anything is measured. Raises UnsupportedError naming the extra to install.
    """
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise UnsupportedError(
            "--plot",
            "this installation",
            reason=f"{error}",
            hint=f'Install what draws: pip install "{EXTRA}"',
        ) from None


def plot(document: Mapping[str, Any], path: str, pyplot: Any) -> None:
    """Draw the medians over the number of workers, a panel for each size and mode, into ``path``,
    in the format that its ending names.
    """
    rows: Sequence[Row] = document["rows"]
    sizes = list(dict.fromkeys(row["bytes"] for row in rows))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    figure, panels = pyplot.subplots(
        len(modes),
        len(sizes),
        squeeze=False,
        sharex=True,
        figsize=(4 * len(sizes), 3.2 * len(modes)),
    )
    for line, mode in enumerate(modes):
        for column, size in enumerate(sizes):
            panel = panels[line][column]
            here = [row for row in rows if (row["bytes"], row["mode"]) == (size, mode)]
            for name in dict.fromkeys(row["transport"] for row in here):
                found = [row for row in here if row["transport"] == name]
                panel.plot(
                    [row["workers"] for row in found],
                    [row["median_us"] for row in found],
                    marker="o",
                    label=name,
                )
            panel.set(xscale="log", yscale="log", title=f"{size_name(size)}, {mode}")
            counts = sorted({row["workers"] for row in here})
            panel.set_xticks(counts, labels=map(str, counts))
            panel.set_xticks([], minor=True)
    panels[0][0].legend()
    for panel in panels[-1]:
        panel.set_xlabel("workers")
    for line_of in panels:
        line_of[0].set_ylabel("median of a call, µs")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
