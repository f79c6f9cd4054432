"""What the executor promises of its calls, as ratios within one run, and whether a run keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

OURS = "hardpoint-mp"
OURS_ON_RAY = "hardpoint-ray"
RAY_SHARE = 1 / 2
"""Of the time of plain actor calls, for four workers."""
KIB = 1024
LARGE = 8 * KIB * KIB
LARGE_SHARES: Mapping[int, float] = {1: 1 / 3, 8: 1 / 6}
"""Of the time of vLLM's queue, by workers, for 8 MiB."""
GROWTH = 1.8
"""Of 8 MiB from one worker to eight."""
IDLE_SHARE = 0.005
CHECKS: Mapping[str, float] = {
    "sigkill_noticed_ms": 10.0,
    "bubble_us": 100.0,
    "bubble_2_workers_us": 100.0,
    "torch_workers_ready_s": 0.5,
    "first_step_ratio": 1.5,
}

Bound = dict[str, Any]


def bounds(document: Mapping[str, Any]) -> list[Bound]:
    """Return every bound of which the document has both sides: ``name``, ``value``, ``bound``,
    ``met``. Called when all is measured.
    """
    return [
        {"name": name, "value": round(value, 4), "bound": round(bound, 4), "met": value <= bound}
        for name, value, bound in _all(document)
    ]


def _all(document: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    medians = {
        (row["transport"], row["workers"], row["bytes"], row["mode"]): row["median_us"]
        for row in document["rows"]
    }
    workers = sorted({key[1] for key in medians})

    def share(peer: str, number: int, size: int, mode: str) -> float | None:
        ours = medians.get((OURS, number, size, mode))
        theirs = medians.get((peer, number, size, mode))
        return None if ours is None or theirs is None else ours / theirs

    yield from _small(share, workers)
    on_ray, plain = (medians.get((name, 4, KIB, "busy")) for name in (OURS_ON_RAY, "ray"))
    if on_ray and plain:
        yield "1 KiB busy, hardpoint-ray / ray, 4 workers", on_ray / plain, RAY_SHARE
    for number, bound in LARGE_SHARES.items():
        if (value := share("vllm-mq", number, LARGE, "busy")) is not None:
            yield f"8 MiB / vllm-mq, {number} workers", value, bound
    one, eight = (medians.get((OURS, number, LARGE, "busy")) for number in (1, 8))
    if one and eight:
        yield "8 MiB, 8 workers / 1 worker", eight / one, GROWTH
    for row in document["idle"]:
        if row["transport"] == OURS:
            yield f"idle share of a core, {row['workers']} workers", row["cpu_share"], IDLE_SHARE
    checks = document.get("checks", {})
    for name, bound in CHECKS.items():
        if name in checks:
            yield name, checks[name], bound


def _small(
    share: Callable[[str, int, int, str], float | None], workers: Sequence[int]
) -> Iterator[tuple[str, float, float]]:
    """The bounds of 1 KiB."""
    for number in workers:
        asked = [("vllm-mq", "busy", 1 / 3), ("pipe", "sporadic", 1.0)]
        asked += [("pipe", "busy", 1 / 2)] if number >= 2 else []
        for peer, mode, bound in asked:
            if (value := share(peer, number, KIB, mode)) is not None:
                yield f"1 KiB {mode} / {peer}, {number} workers", value, bound
