"""Tokens per second of the tpu platform as XLA on CPU, beside the cpu platform and `transformers`,
in one run; how long its programs take to compile, without and with its cache of them; and where the
time of a step goes.

    python benchmarks/xla.py [--quick] [--dtype float32] [--repeats 7] [--threads 2] [--json]
    python benchmarks/xla.py --profile

XLA on CPU; never run on a TPU: nothing here says how fast a TPU would be. The engines take turns,
each in a process of its own (see `turns.py`). `--quick`: few shapes, short answers, one turn. The
profile is in `xla_profile.py`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import ExitStack

import serving
import turns

LABEL = "XLA on CPU; never run on a TPU"
QUICK_CASES: dict[str, turns.Case] = {
    "decode batch 1": (1, 16, 16),
    "decode batch 16": (16, 16, 8),
    "prefill 1000": (1, 1000, 1),
}
QUICK_BUCKETS = {"request_buckets": (1, 16), "token_buckets": (16, 256, 1024)}


class Tpu:
    """The tpu platform on the CPU. ``started`` says how long compiling took."""

    def __init__(self, options: argparse.Namespace) -> None:
        from hardpoint_engine import LLM

        buckets = QUICK_BUCKETS if options.quick or options.profile else {}
        settings = {"backend": "cpu", "compilation_cache": options.cache, "memory_bytes": 4 << 30}
        begun = time.perf_counter()
        self.llm = LLM(
            model=options.model,
            platform="tpu",
            executor="uni",
            dtype=options.dtype,
            max_model_len=2048,
            max_num_seqs=16,
            max_num_batched_tokens=1024,
            plugins={"tpu": settings | buckets},
        )
        seconds = time.perf_counter() - begun
        (report,) = self.llm.collective_rpc("program_report")
        self.started = {
            "start_s": round(seconds, 2),
            "compile_s": round(self.llm.core.executor.warm_up_report.language_s, 2),
            "programs": report.asked,
            "from_cache": report.cached,
        }

    def run(self, tokens: list[list[int]], new: int) -> int:
        return serving.generated(self.llm, tokens, new)


ENGINES = {"tpu": Tpu, "cpu": serving.Hardpoint, "transformers": serving.Transformers}


def compile_times(cache: str) -> dict[str, dict[str, float]]:
    """Start twice over one folder, empty at first."""
    found = {}
    for name in ("cold", "warm"):
        with turns.Child("--child", "tpu", "--cache", cache) as child:
            found[name] = child.ask()
        found[name].pop("ready")
    return found


def measure(options: argparse.Namespace, cache: str) -> list[dict[str, object]]:
    with ExitStack() as stack:
        children = {
            name: stack.enter_context(turns.Child("--child", name, "--cache", cache))
            for name in ENGINES
        }
        for child in children.values():
            child.ask()
        cases, repeats = (QUICK_CASES, 1) if options.quick else (turns.CASES, options.repeats)
        return turns.measured(children, cases, repeats, "tpu")


def main() -> None:
    parser = serving.arguments(__doc__, ENGINES)
    parser.add_argument("--quick", action="store_true", help="few shapes, short answers")
    parser.add_argument("--profile", action="store_true", help="where a step's time goes")
    parser.add_argument("--cache", default="none", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        turns.serve(ENGINES[options.child](options))
        return
    if options.profile:
        from xla_profile import profile

        print(f"tpu platform: {LABEL}", flush=True)
        profile(Tpu(options).llm)
        return
    with tempfile.TemporaryDirectory() as cache:
        compiled = compile_times(cache)
        rows = measure(options, cache)
    if options.json:
        found = {"label": LABEL, "dtype": options.dtype, "compile": compiled, "rows": rows}
        print(json.dumps(found))
        return
    print(f"tpu platform: {LABEL}")
    for name, found in compiled.items():
        print(
            f"{name:4} start {found['start_s']:7} s, of it compiling {found['compile_s']:7} s: "
            f"{found['programs']} programs, {found['from_cache']} from the cache"
        )
    for row in rows:
        print(options.dtype, turns.text_of(row))


if __name__ == "__main__":
    main()
