"""Tokens per second through `LLM` and through `transformers`, on the same weights, dtype and
threads.

    python benchmarks/serving.py [--dtype float32] [--repeats 7] [--threads 2] [--json]

Each engine lives in a process of its own, so that neither's idle threads take the other's cores;
the two take turns, and the medians and their ratio are printed. Decode figures include the prefill
of a 16-token prompt, for both. Every repetition has new random prompts, so that no prefix cache
helps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time

CASES = {
    "decode batch 1": (1, 16, 64),
    "decode batch 16": (16, 16, 64),
    "prefill 1000": (1, 1000, 1),
}
VOCABULARY = (1000, 40000)


def prompts(batch: int, length: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(*VOCABULARY) for _ in range(length)] for _ in range(batch)]


class Hardpoint:
    def __init__(self, options: argparse.Namespace) -> None:
        from hardpoint_engine import LLM

        self.llm = LLM(
            model=options.model,
            platform="cpu",
            executor="uni",
            dtype=options.dtype,
            max_model_len=2048,
            plugins={"cpu": {"threads": options.threads}},
        )

    def run(self, tokens: list[list[int]], new: int) -> int:
        from hardpoint_engine import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True)
        return sum(len(r.outputs[0].token_ids) for r in self.llm.generate(tokens, params))


class Transformers:
    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from hardpoint.default_model import find_default_model
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(options.threads)
        path = options.model or find_default_model()
        folder, _, name = str(path).rpartition("/")
        source = {"gguf_file": name} if name.endswith(".gguf") else {}
        self.model = AutoModelForCausalLM.from_pretrained(
            folder if source else str(path), dtype=getattr(torch, options.dtype), **source
        )

    def run(self, tokens: list[list[int]], new: int) -> int:
        import torch

        ids = torch.tensor(tokens)
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=new,
            max_new_tokens=new, pad_token_id=0,
        )  # fmt: skip
        return int((out.shape[1] - ids.shape[1]) * ids.shape[0])


ENGINES = {"hardpoint": Hardpoint, "transformers": Transformers}


def serve(options: argparse.Namespace) -> None:
    """The child: one engine, one case per line on standard input."""
    engine = ENGINES[options.child](options)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        batch, length, new, seed = json.loads(line)
        tokens = prompts(batch, length, seed)
        start = time.perf_counter()
        made = engine.run(tokens, new)
        seconds = time.perf_counter() - start
        if made != batch * new:
            raise SystemExit(f"{options.child} made {made} tokens, not {batch * new}")
        print(json.dumps({"seconds": seconds}), flush=True)


def ask(child: subprocess.Popen[str], message: object | None = None) -> dict[str, float]:
    assert child.stdin is not None
    assert child.stdout is not None
    if message is not None:
        child.stdin.write(json.dumps(message) + "\n")
        child.stdin.flush()
    for line in child.stdout:
        if line.startswith("{"):
            answer: dict[str, float] = json.loads(line)
            return answer
    raise SystemExit("an engine's process ended early; run it alone to see why")


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    children = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--child", name, *sys.argv[1:]],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for name in ENGINES
    }  # fmt: skip
    rows: list[dict[str, object]] = []
    try:
        for child in children.values():
            ask(child)
        for case, (batch, length, new) in CASES.items():
            seconds: dict[str, list[float]] = {name: [] for name in children}
            for repeat in range(options.repeats + 1):
                for name, child in children.items():
                    took = ask(child, [batch, length, new, repeat])["seconds"]
                    if repeat:  # the first turn warms up
                        seconds[name].append(took)
            tokens = batch * new if new > 1 else length
            medians = {name: tokens / statistics.median(times) for name, times in seconds.items()}
            pairs = zip(seconds["transformers"], seconds["hardpoint"], strict=True)
            ratio = statistics.median(theirs / ours for theirs, ours in pairs)
            rows.append(
                {"case": case, "dtype": options.dtype, "ratio": round(ratio, 2)}
                | {name: round(value, 1) for name, value in medians.items()}
            )
    finally:
        for child in children.values():
            if child.stdin is not None:
                child.stdin.close()
            child.wait(30)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None, help="default: the installed default model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=tuple(ENGINES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(options)
        return
    rows = measure(options)
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    for row in rows:
        print(
            f"{row['case']:16} {row['dtype']:9} hardpoint {row['hardpoint']:8} tok/s   "
            f"transformers {row['transformers']:8} tok/s   ratio {row['ratio']}"
        )


if __name__ == "__main__":
    main()
