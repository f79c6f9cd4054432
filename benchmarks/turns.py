"""Engines that are compared: each in a process of its own, so that no engine's idle threads take
another's cores; they take turns over the same cases.

Decode figures include the prefill of a 16-token prompt, for all. Every repetition has new random
prompts, so that no prefix cache helps.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

Case = tuple[int, int, int]
"""Requests, tokens of each prompt, new tokens of each."""
CASES: dict[str, Case] = {
    "decode batch 1": (1, 16, 64),
    "decode batch 16": (16, 16, 64),
    "prefill 1000": (1, 1000, 1),
}
VOCABULARY = (1000, 40000)


class Engine(Protocol):
    """``started``, where there is one, is told to the parent: how long the start took, say."""

    def run(self, tokens: list[list[int]], new: int) -> int:
        """Generate ``new`` tokens after each prompt; return how many there were in all."""


def prompts(batch: int, length: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(*VOCABULARY) for _ in range(length)] for _ in range(batch)]


def serve(engine: Engine) -> None:
    """Be the child: one turn per line on standard input."""
    print(json.dumps({"ready": True} | getattr(engine, "started", {})), flush=True)
    for line in sys.stdin:
        batch, length, new, seed = json.loads(line)
        tokens = prompts(batch, length, seed)
        start = time.perf_counter()
        made = engine.run(tokens, new)
        seconds = time.perf_counter() - start
        if made != batch * new:
            raise SystemExit(f"{type(engine).__name__} made {made} tokens, not {batch * new}")
        print(json.dumps({"seconds": seconds}), flush=True)


class Child:
    """This script once more, with ``arguments`` and those that it was given itself."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, sys.argv[0], *arguments, *sys.argv[1:]],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, message: object | None = None) -> dict[str, Any]:
        """Send a turn, if any, and wait for the next answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if message is not None:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit("an engine's process ended early; run it alone to see why")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def measured(
    children: Mapping[str, Child], cases: Mapping[str, Case], repeats: int, first: str
) -> list[dict[str, object]]:
    """Return a row a case: each engine's tokens per second (median), and the median ratio of
    ``first``'s speed to each other's, turn by turn. One turn more than ``repeats`` warms up.
    """
    rows: list[dict[str, object]] = []
    for case, (batch, length, new) in cases.items():
        seconds: dict[str, list[float]] = {name: [] for name in children}
        for repeat in range(repeats + 1):
            for name, child in children.items():
                took = child.ask([batch, length, new, repeat])["seconds"]
                if repeat:
                    seconds[name].append(took)
        tokens = batch * new if new > 1 else length
        speeds = {
            name: round(tokens / statistics.median(each), 1) for name, each in seconds.items()
        }
        ratios = {
            f"{first} / {name}": round(_ratio(seconds[name], seconds[first]), 2)
            for name in children
            if name != first
        }
        rows.append({"case": case} | speeds | ratios)
    return rows


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def text_of(row: Mapping[str, object]) -> str:
    """Return a row as a line."""
    words = [f"{row['case']!s:16}"]
    for name, value in row.items():
        if name != "case":
            words.append(f"{name} {value!s}" if "/" in name else f"{name} {value!s:>8} tok/s")
    return "   ".join(words)
