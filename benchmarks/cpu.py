"""Tokens per second of the cpu platform through `LLM`: as a native program, through torch, and
`transformers` beside them, on the same weights, type and threads.

    python benchmarks/cpu.py [--dtype float32] [--repeats 3] [--threads 2] [--cases B1,P] [--json]

The engines take turns, each in a process of its own (see `turns.py`); medians and the median ratio
of a turn are printed. `--json` prints `{"rows": [{"engine", "format", "phase", "batch",
"tokens_per_s", "at"}]}`; `hardpoint` is the native program, `at` is when the run began.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
from contextlib import ExitStack
from typing import ClassVar

import serving
import turns

CASES: dict[str, tuple[str, turns.Case]] = {
    "B1": ("decode", (1, 16, 48)),
    "B16": ("decode", (16, 16, 32)),
    "B64": ("decode", (64, 16, 16)),
    "P": ("prefill", (1, 1000, 1)),
}
FORMATS = {"float32": "fp32", "bfloat16": "bf16"}


class Native(serving.Hardpoint):
    """The cpu platform, as a native program."""

    keys: ClassVar = {"max_num_seqs": 64}
    settings: ClassVar = {"native": "on"}


class Torch(Native):
    """The same through torch."""

    settings: ClassVar = {"native": "off"}


ENGINES = {"hardpoint": Native, "hardpoint-torch": Torch, "transformers": serving.Transformers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None, help="default: the installed default model")
    parser.add_argument("--dtype", choices=tuple(FORMATS), default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cases", default=",".join(CASES), help="which of " + ", ".join(CASES))
    parser.add_argument("--engines", default=",".join(ENGINES), help="which of them")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=tuple(ENGINES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        turns.serve(ENGINES[options.child](options))
        return
    at = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    names = options.cases.split(",")
    cases = {name: CASES[name][1] for name in names}
    engines = options.engines.split(",")
    with ExitStack() as stack:
        children = {name: stack.enter_context(turns.Child("--child", name)) for name in engines}
        for child in children.values():
            child.ask()
        rows = turns.measured(children, cases, options.repeats, engines[0])
    if not options.json:
        for row in rows:
            print(FORMATS[options.dtype], turns.text_of(row), flush=True)
        return
    found = [
        {
            "engine": engine,
            "format": FORMATS[options.dtype],
            "phase": CASES[name][0],
            "batch": CASES[name][1][0],
            "tokens_per_s": row[engine],
            "at": at,
        }
        for name, row in zip(names, rows, strict=True)
        for engine in engines
    ]
    print(json.dumps({"rows": found}))


if __name__ == "__main__":
    main()
