"""Tokens per second of the tpu platform as XLA on CPU, beside the cpu platform and `transformers`,
in one run; and how long its programs take to compile, without and with its cache of them.

    python benchmarks/xla.py [--dtype float32] [--repeats 7] [--threads 2] [--json]

XLA on CPU; never run on a TPU: nothing here says how fast a TPU would be. Each engine lives in a
process of its own and they take turns; see `serving.py`, whose cases and engines these are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

import serving

LABEL = "XLA on CPU; never run on a TPU"


class Tpu:
    """The tpu platform on the CPU. ``started`` says how long compiling took."""

    def __init__(self, options: argparse.Namespace) -> None:
        from hardpoint_engine import LLM

        settings = {"backend": "cpu", "compilation_cache": options.cache, "memory_bytes": 4 << 30}
        begun = time.perf_counter()
        self.llm = LLM(
            model=options.model,
            platform="tpu",
            executor="uni",
            dtype=options.dtype,
            max_model_len=2048,
            max_num_batched_tokens=1024,
            plugins={"tpu": settings},
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
        from hardpoint_engine import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True)
        return sum(len(r.outputs[0].token_ids) for r in self.llm.generate(tokens, params))


ENGINES = {"tpu": Tpu, "cpu": serving.Hardpoint, "transformers": serving.Transformers}


def serve(options: argparse.Namespace) -> None:
    """The child: one engine, one case per line on standard input."""
    engine = ENGINES[options.child](options)
    print(json.dumps({"ready": True} | getattr(engine, "started", {})), flush=True)
    for line in sys.stdin:
        batch, length, new, seed = json.loads(line)
        tokens = serving.prompts(batch, length, seed)
        start = time.perf_counter()
        made = engine.run(tokens, new)
        seconds = time.perf_counter() - start
        if made != batch * new:
            raise SystemExit(f"{options.child} made {made} tokens, not {batch * new}")
        print(json.dumps({"seconds": seconds}), flush=True)


def child(name: str, folder: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, "--child", name, "--cache", folder, *sys.argv[1:]],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    process.wait(60)


def compile_times(folder: str) -> dict[str, dict[str, float]]:
    """Start twice over one folder, empty at first."""
    found = {}
    for name in ("cold", "warm"):
        process = child("tpu", folder)
        try:
            found[name] = serving.ask(process)
        finally:
            end(process)
        found[name].pop("ready")
    return found


def measure(options: argparse.Namespace, folder: str) -> list[dict[str, object]]:
    children = {name: child(name, folder) for name in ENGINES}
    rows: list[dict[str, object]] = []
    try:
        for process in children.values():
            serving.ask(process)
        for case, (batch, length, new) in serving.CASES.items():
            seconds: dict[str, list[float]] = {name: [] for name in children}
            for repeat in range(options.repeats + 1):
                for name, process in children.items():
                    took = serving.ask(process, [batch, length, new, repeat])["seconds"]
                    if repeat:  # the first turn warms up
                        seconds[name].append(took)
            tokens = batch * new if new > 1 else length
            row: dict[str, object] = {"case": case, "dtype": options.dtype}
            for name, times in seconds.items():
                row[name] = round(tokens / statistics.median(times), 1)
            for name in ("cpu", "transformers"):
                pairs = zip(seconds[name], seconds["tpu"], strict=True)
                row[f"tpu / {name}"] = round(statistics.median(a / b for a, b in pairs), 2)
            rows.append(row)
    finally:
        for process in children.values():
            end(process)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None, help="default: the installed default model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="of the cpu platform and torch")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=tuple(ENGINES), help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        compiled = compile_times(folder)
        rows = measure(options, folder)
    if options.json:
        print(json.dumps({"label": LABEL, "compile": compiled, "rows": rows}))
        return
    print(f"tpu platform: {LABEL}")
    for name, found in compiled.items():
        print(
            f"{name:4} start {found['start_s']:7} s, of it compiling {found['compile_s']:7} s: "
            f"{found['programs']} programs, {found['from_cache']} from the cache"
        )
    for row in rows:
        figures = "   ".join(f"{name} {row[name]:8} tok/s" for name in ENGINES)
        ratios = "   ".join(f"{key} {row[key]}" for key in row if key.startswith("tpu /"))
        print(f"{row['case']:16} {row['dtype']:9} {figures}   {ratios}")


if __name__ == "__main__":
    main()
