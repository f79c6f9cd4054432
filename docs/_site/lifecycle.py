"""The picture of a run, drawn from what ``diary.py`` wrote down of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path

Event = tuple[str, str, str]
"""(process, kind, name)"""

PHASES = (
    ("hardpoint_platform", "A platform is chosen, the configuration completed and checked"),
    ("start_workers", "Workers are started"),
    ("init_device", "Devices are taken, the model is loaded"),
    ("get_kv_cache_spec", "The KV cache is sized, allocated, everything warmed up"),
    ("check_request", "Requests come, steps run"),
    ("sleep", "Memory is given back and taken again"),
    ("probe_health", "Somebody asks whether the workers are well"),
    ("stop_workers", "The end"),
)
"""What a phase begins with, and what it is called."""

ROW, TOP, LANE, BOX, WIDTH = 26, 34, {"driver": 20, "worker": 390}, 320, 730
HIGH = 20
COLOURS = {"hook": "#2f6f9f", "platform": "#6b5b95", "executor": "#8a6d1f", "worker": "#3c7a4e"}


@cache
def diary() -> tuple[Event, ...]:
    """Return the notes of a run, made in a process of its own."""
    script = Path(__file__).with_name("diary.py")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HARDPOINT")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        capture_output=True,
        text=True,
        check=False,
        env=kept,
    )
    if done.returncode:
        raise RuntimeError(f"the run that the lifecycle is drawn from failed:\n{done.stderr}")
    return tuple((process, kind, name) for process, kind, name in json.loads(done.stdout))


def phases(events: Sequence[Event]) -> list[tuple[str, list[Event]]]:
    """Return the title and the events of each phase; what was seen in a phase is not repeated."""
    titles = dict(PHASES)
    found: list[tuple[str, list[Event]]] = []
    for event in events:
        if (title := titles.pop(event[2], None)) is not None:
            found.append((title, []))
        seen = found[-1][1]
        again = event[1] == "platform" and any(event in earlier for _, earlier in found)
        if event not in seen and not again:
            seen.append(event)
    if titles:
        raise RuntimeError(f"a run no longer has {', '.join(titles)}: see PHASES in {__file__}")
    return found


def picture() -> str:
    """Return the run as an SVG: the driver's calls on the left, the worker's on the right."""
    parts, y = [], TOP
    for title, events in phases(diary()):
        parts.append(f'<text x="20" y="{y + 18}" class="phase">{escape(title)}</text>')
        y += ROW + 4
        for process, kind, name in events:
            if kind == "worker":
                parts.append(_call(y + HIGH // 2))
            x = LANE[process]
            parts.append(
                f'<rect x="{x}" y="{y}" width="{BOX}" height="{HIGH}" rx="4" '
                f'fill="{COLOURS[kind]}"/><text x="{x + 10}" y="{y + 14}" class="call">'
                f"{_shown(kind, name)}</text>"
            )
            y += ROW
        y += 8
    style = (
        ".phase{font:600 14px sans-serif;fill:currentColor}"
        ".lane{font:600 13px sans-serif;fill:currentColor}"
        ".call{font:12px monospace;fill:#fff}"
        ".cross{stroke:currentColor;fill:none}.head{fill:currentColor}"
    )
    heads = "".join(
        f'<text x="{x}" y="20" class="lane">{text}</text>'
        for x, text in ((LANE["driver"], "the driver"), (LANE["worker"], "each worker"))
    )
    return (
        '<svg role="img" aria-label="The calls of a run, in their order" '
        f'viewBox="0 0 {WIDTH} {y}" xmlns="http://www.w3.org/2000/svg" '
        f'style="max-width:{WIDTH}px;width:100%">'
        f"<style>{style}</style>{heads}{''.join(parts)}</svg>\n"
    )


def _shown(kind: str, name: str) -> str:
    owner = {"platform": "Platform.", "executor": "Executor.", "worker": "Worker."}
    return escape(owner.get(kind, "") + name + "()")


def _call(y: int) -> str:
    start, end = LANE["driver"] + BOX // 2, LANE["worker"]
    return (
        f'<path class="cross" d="M{start} {y} H{end - 4}"/>'
        f'<path class="head" d="M{end} {y} l-8 -4 v8 z"/>'
    )


def order() -> str:
    """Return the same as a table, for who cannot see the picture."""
    from tables import table

    rows = [
        (title if index == 0 else "", f"`{_shown(kind, name)}`", process, kind)
        for title, events in phases(diary())
        for index, (process, kind, name) in enumerate(events)
    ]
    return table(("phase", "call", "in", "of"), rows)
