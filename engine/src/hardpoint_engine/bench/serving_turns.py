"""One engine of ``hardpoint bench cpu``, run by ``orders.py``: of Hardpoint it needs nothing."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

ALONE = True
"""Whether its process has no other ones, which it would have to end."""
VOCABULARY = (1000, 40000)
"""Prompts are of ids in this range, or of as much of it as there is."""


class Engine(Protocol):
    """What a file of ``serving_engines`` has a class of; made with the options."""

    vocab_size: int

    def run(self, prompts: list[list[int]], new: int) -> int:
        """Generate ``new`` tokens after each prompt; return how many there were in all."""

    def figures(self) -> dict[str, float]:
        """Return what else it knows of itself."""

    def close(self) -> None:
        """End it."""


class WrongCountError(Exception):
    """An engine did not make as many tokens as it was to."""


def prompts(batch: int, length: int, seed: int, vocab_size: int) -> list[list[int]]:
    """Return random prompts, others for each seed, so that no prefix cache helps."""
    draw = random.Random(seed)  # noqa: S311 - ids, not keys
    low, high = min(VOCABULARY[0], vocab_size // 2), min(VOCABULARY[1], vocab_size)
    return [[draw.randrange(low, high) for _ in range(length)] for _ in range(batch)]


class Orders:
    """Does what it is told, by the name of the order."""

    def __init__(self, engine: Engine, about: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._engine = engine
        self.about = dict(about)

    def turn(self, batch: int, length: int, new: int, seed: int) -> dict[str, Any]:
        """Serve one batch; tell the seconds it took."""
        given = prompts(batch, length, seed, self._engine.vocab_size)
        begin = time.perf_counter()
        made = self._engine.run(given, new)
        seconds = time.perf_counter() - begin
        if made != batch * new:
            raise WrongCountError(f"{made} tokens were made, not {batch * new}")
        return {"seconds": seconds}

    def figures(self) -> dict[str, Any]:
        """Tell what else is known."""
        return dict(self._engine.figures())

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


def orders(load_file: Callable[[str, str], Any], path: str, options: str) -> Orders:
    """Return what does the orders by the engine of a file, made with ``options``, a JSON document.
    Raises ImportError if its library is not installed.
    """
    begin = time.perf_counter()
    module = load_file(path, "serving_engine")
    engine: Engine = module.Engine(**json.loads(options))
    return Orders(engine, {"started_s": time.perf_counter() - begin})
