"""What ``hardpoint bench cpu`` is held against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

CELLS: Final = (("decode", 1), ("decode", 16), ("decode", 64), ("prefill", 1))
_BF16: Final = {"vllm": (2.5, 2.5, 1.8, 1.5), "llama.cpp": (1.4, 1.8, 2.0, 2.0)}
RATIOS: Final[Mapping[tuple[str, str], tuple[float, float, float, float]]] = {
    ("bf16", "vllm"): _BF16["vllm"],
    ("bf16-bfloat16", "vllm"): _BF16["vllm"],
    ("w8a8", "vllm"): (6.0, 5.5, 3.7, 2.2),
    ("bf16", "llama.cpp"): _BF16["llama.cpp"],
    ("bf16-bfloat16", "llama.cpp"): _BF16["llama.cpp"],
    ("Q8_0", "llama.cpp"): (2.0, 2.5, 2.0, 2.0),
    ("Q4_0", "llama.cpp"): (1.5, 2.0, 2.0, 2.0),
    ("Q4_1", "llama.cpp"): (2.0, 3.0, 2.0, 2.0),
}
"""(format, against) -> the least ratio in each of ``CELLS``; bf16 with bfloat16 activations, as the
peers multiply it, is held against the same as bf16.
"""
READ_SHARES: Final[Mapping[str, float]] = {"bf16": 0.70, "int8": 0.75, "w8a8": 0.75}
"""Format -> the least share of the bandwidth of reading that weights are read with at batch 1."""
OVERHEAD: Final = 0.05
"""The most time of the engine beside the bare step, as a share of it, at batch 1."""

Row = dict[str, Any]


def judged_ratios(ratios: Iterable[Row]) -> list[Row]:
    """Return the ratios, those that have a bound with ``bound`` and ``met``."""
    found = []
    for each in ratios:
        bounds = RATIOS.get((each["format"], each["against"]))
        cell = (each["phase"], each["batch"])
        judged = {}
        if bounds is not None and cell in CELLS:
            bound = bounds[CELLS.index(cell)]
            judged = {"bound": bound, "met": each["ratio"] >= bound}
        found.append({**each, **judged})
    return found


def ratio_bounds(
    judged: Iterable[Row], formats: Sequence[str], cells: Iterable[tuple[str, int]]
) -> list[Row]:
    """Return every bound of the ``formats`` in the ``cells`` (phase, batch) as ``name``, ``value``,
    ``bound`` and whether it is ``met``; both are None where a peer was not measured.
    """
    found = {
        (each["format"], each["against"], each["phase"], each["batch"]): each["ratio"]
        for each in judged
    }
    measured = [cell for cell in CELLS if cell in set(cells)]
    rows = []
    for (kind, against), bounds in RATIOS.items():
        for cell in measured if base(kind) in formats else ():
            bound, value = bounds[CELLS.index(cell)], found.get((kind, against, *cell))
            met = None if value is None else value >= bound
            name = f"{kind} / {against}, {case_name(*cell)}"
            rows.append({"name": name, "value": value, "bound": bound, "met": met})
    return rows


def base(kind: str) -> str:
    """Return the format of the weights: without what they are multiplied with."""
    return kind.partition("-")[0]


def case_name(phase: str, batch: int) -> str:
    """Return how a case is told."""
    return f"{phase} B={batch}" if phase == "decode" else phase


def figures_of(
    told: Mapping[str, float], kind: str, rows: Sequence[Row], bytes_per_s: float
) -> dict[str, float]:
    """Return what our engine's figures in the format ``kind`` come to: ``overhead``, ``read_share``
    and the peak of memory and the weights in bytes.
    """
    found = {
        "overhead": round(told["ran_s"] / told["step_s"] - 1, 4),
        "weight_bytes": told["weight_bytes"],
        "peak_bytes": told["peak_bytes"],
    }
    for row in rows:
        if (row["format"], row["phase"], row["batch"]) == (kind, "decode", 1):
            read = row["tokens_per_s"] * told["weight_bytes"]
            found["read_share"] = round(read / bytes_per_s, 3)
    return found


def judged_figures(figures: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """Return the bounds of those figures that have one, each ``name``, ``value``, ``bound`` and
    whether it is ``met``.
    """
    found = []
    for kind, each in figures.items():
        if "overhead" in each:
            value = each["overhead"]
            found.append(_bound(f"{kind}: overhead", value, OVERHEAD, value <= OVERHEAD))
        if "read_share" in each and kind in READ_SHARES:
            value, bound = each["read_share"], READ_SHARES[kind]
            found.append(_bound(f"{kind}: share of bandwidth", value, bound, value >= bound))
    return found


def _bound(name: str, value: float, bound: float, met: bool) -> Row:
    return {"name": name, "value": value, "bound": bound, "met": met}
