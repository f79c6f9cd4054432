"""One side of a benchmark, a process of its own: ``python orders.py turns.py transports/NAME.py``,
``python orders.py serving_turns.py serving_engines/NAME.py OPTIONS``.

Run by path, in the interpreter that has the library of what is measured; of Hardpoint it needs
nothing. It does one order after the other, a JSON document a line on standard input, and answers
each with one. Whatever else is printed goes to standard error.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG = 1


def load_file(path: str, name: str) -> Any:
    """Return the module of a file, which is not entered into ``sys.modules``: what sends a class of
    it to other processes then sends all of it. Raises ImportError.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def end_with_parent() -> None:
    """Have the kernel end this process with the one that started it, also within an order."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def main(script: str, *arguments: str) -> None:
    """Serve orders until standard input ends. ``script`` has a function ``orders(load_file,
    *arguments)``, which returns what has a method for each order, ``close`` and ``about``, its
    first answer.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.set_inheritable(answers.fileno(), False)

    def answer(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    module = load_file(script, "turns")
    if module.ALONE:
        end_with_parent()
    try:
        orders = module.orders(load_file, *arguments)
    except ImportError as error:
        answer({"missing": str(error)})
        return
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise
    answer(orders.about)
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
        orders.close()


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose names are not top-level modules
    main(*sys.argv[1:])
