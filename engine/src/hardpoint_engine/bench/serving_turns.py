"""One engine of ``hardpoint bench cpu``, a process of its own:
``python serving_turns.py serving_engines/NAME.py OPTIONS``, the options a JSON document.

Run by path, in the interpreter that has the engine's library. It does one order after the other, a
JSON document a line on standard input, and answers each with one. Whatever else is printed goes to
standard error.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
import time
from typing import Any, Protocol

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


def load_engine(path: str, options: dict[str, Any]) -> Engine:
    """Return the engine of a file. Raises ImportError if its library is not installed."""
    spec = importlib.util.spec_from_file_location("serving_engine", path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["serving_engine"] = module
    spec.loader.exec_module(module)
    engine: Engine = module.Engine(**options)
    return engine


def prompts(batch: int, length: int, seed: int, vocab_size: int) -> list[list[int]]:
    """Return random prompts, others for each seed, so that no prefix cache helps."""
    draw = random.Random(seed)  # noqa: S311 - ids, not keys
    low, high = min(VOCABULARY[0], vocab_size // 2), min(VOCABULARY[1], vocab_size)
    return [[draw.randrange(low, high) for _ in range(length)] for _ in range(batch)]


class Orders:
    """Does what it is told, by the name of the order."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

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


def main(path: str, options: str) -> None:
    """Serve orders until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.set_inheritable(answers.fileno(), False)

    def answer(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    begin = time.perf_counter()
    try:
        engine = load_engine(path, json.loads(options))
    except ImportError as error:
        answer({"missing": str(error)})
        return
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise
    answer({"started_s": time.perf_counter() - begin})
    orders = Orders(engine)
    try:
        for line in sys.stdin:
            order = json.loads(line)
            try:
                done = getattr(orders, order.pop("do"))(**order)
            except Exception as error:
                answer({"error": f"{type(error).__name__}: {error}"})
                raise
            answer(done)
    finally:
        engine.close()


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose names are not top-level modules
    main(sys.argv[1], sys.argv[2])
