"""How the steps of an engine were padded and run: counted, and shown as a table."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from typing import Any

from attrs import define, field
from hardpoint.messages import GraphStats

EAGER = "NONE"
"""The mode of a step that replayed no graph."""
_TITLES = ("mode", "tokens", "padded", "pads", "steps")


@define
class GraphTable:
    """Steps by (tokens, padded tokens, mode). Steps of workers without graphs are not counted."""

    counts: Counter[GraphStats] = field(factory=Counter)

    def add(self, stats: GraphStats | None) -> None:
        """Count one step; None says nothing of graphs."""
        if stats is not None:
            self.counts[stats] += 1

    @property
    def modes(self) -> dict[str, int]:
        """Steps by mode."""
        modes: Counter[str] = Counter()
        for stats, steps in self.counts.items():
            modes[stats.mode] += steps
        return dict(modes)

    @property
    def pads(self) -> int:
        """Tokens that were computed for nobody."""
        return sum((each.padded - each.unpadded) * steps for each, steps in self.counts.items())

    def rows(self) -> list[tuple[GraphStats, int]]:
        """Return (statistics, steps), the most frequent first."""
        return sorted(
            self.counts.items(),
            key=lambda row: (-row[1], row[0].mode, row[0].unpadded, row[0].padded),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain data: one entry for each row of the table."""
        return {
            "modes": self.modes,
            "pads": self.pads,
            "steps": [
                {"mode": each.mode, "unpadded": each.unpadded, "padded": each.padded, "steps": n}
                for each, n in self.rows()
            ],
        }

    def text(self) -> str:
        """Return the table in lines, a summary last."""
        if not self.counts:
            return "graphs: no step reported any\n"
        rows = [
            (each.mode, each.unpadded, each.padded, each.padded - each.unpadded, steps)
            for each, steps in self.rows()
        ]
        cells = [_TITLES, *(tuple(map(str, row)) for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if index else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in cells
        ]
        return "\n".join([*lines, self._summary()]) + "\n"

    def _summary(self) -> str:
        steps = self.counts.total()
        replayed = steps - self.modes.get(EAGER, 0)
        tokens = sum(each.padded * count for each, count in self.counts.items())
        return (
            f"{replayed} of {steps} steps replayed a graph; {self.pads} of {tokens} tokens were "
            "padding"
        )


def print_table(table: GraphTable) -> None:
    """Write ``table`` to standard error, if there is one. Called where an engine ends and the key
    ``graph_stats`` asks for it.
    """
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # closed or broken: nobody reads it
            sys.stderr.write(table.text())
            sys.stderr.flush()
