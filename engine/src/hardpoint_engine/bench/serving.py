"""How fast one engine answers: latency of a batch, and throughput of many requests at once."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen
from hardpoint.sampling_params import SamplingParams

from hardpoint_engine.llm import LLM
from hardpoint_engine.outputs import RequestOutput

SEED = 7
Row = dict[str, Any]


@frozen(kw_only=True)
class ServingPlan:
    """What is measured: for each number of ``requests`` that come at once, ``repeats`` times after
    ``warm_ups`` that do not count. Prompts are random ids, none alike, so that none is cached.
    """

    requests: tuple[int, ...]
    prompt_tokens: int = 32
    output_tokens: int = 32
    repeats: int = 5
    warm_ups: int = 1
    varied: bool = False
    """Whether lengths are drawn, from a half of those numbers to one and a half."""


LATENCY = ServingPlan(requests=(1, 2, 4, 8))
THROUGHPUT = ServingPlan(requests=(1, 8, 64), repeats=3, varied=True)


def measure(llm: LLM, plan: ServingPlan, name: str, tell: Callable[[str], None]) -> Row:
    """Return the whole document. Times are in seconds."""
    draw = random.Random(SEED)  # noqa: S311 - lengths and ids, not keys
    rows = []
    for count in plan.requests:
        runs = [_run(llm, plan, count, draw) for _ in range(plan.warm_ups + plan.repeats)]
        rows.append(_row(count, runs[plan.warm_ups :]))
        tell(line_of(rows[-1]))
    return {
        "bench": name,
        "model": str(llm.description.path),
        "platform": llm.platform.name,
        "prompt_tokens": plan.prompt_tokens,
        "output_tokens": plan.output_tokens,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "rows": rows,
    }


def line_of(row: Mapping[str, Any]) -> str:
    """Return one row as text."""
    return (
        f"{row['requests']:5} requests: {row['median_s']:8.3f} s (p90 {row['p90_s']:.3f}), first "
        f"token {row['first_token_s'] * 1e3:8.1f} ms, then {row['per_token_s'] * 1e3:7.2f} ms "
        f"each, {row['output_tokens_per_s']:8.1f} tokens/s"
    )


def _run(
    llm: LLM, plan: ServingPlan, count: int, draw: random.Random
) -> tuple[float, Sequence[RequestOutput]]:
    """Return how long one batch took, and its results."""
    vocab_size = llm.description.vocab_size
    prompts = [
        [draw.randrange(vocab_size) for _ in range(_length(plan.prompt_tokens, plan, draw))]
        for _ in range(count)
    ]
    lengths = [_length(plan.output_tokens, plan, draw) for _ in range(count)]
    params = [
        SamplingParams(temperature=0, max_tokens=length, min_tokens=length, ignore_eos=True)
        for length in lengths
    ]
    begin = time.perf_counter()
    results = llm.generate(prompts, params)
    return time.perf_counter() - begin, results


def _length(mean: int, plan: ServingPlan, draw: random.Random) -> int:
    return max(1, draw.randint(mean // 2, mean + mean // 2)) if plan.varied else mean


def _row(count: int, runs: Sequence[tuple[float, Sequence[RequestOutput]]]) -> Row:
    seconds = sorted(taken for taken, _ in runs)
    metrics = [result.metrics for _, results in runs for result in results if result.metrics]
    total = sum(seconds)
    generated = sum(each.num_output for each in metrics)
    computed = sum(each.num_prompt + each.num_output for each in metrics)
    return {
        "requests": count,
        "runs": len(runs),
        "median_s": statistics.median(seconds),
        "p90_s": seconds[min(len(seconds) - 1, int(0.9 * len(seconds)))],
        "first_token_s": _median(each.time_to_first_token for each in metrics),
        "per_token_s": _median(each.time_per_output_token for each in metrics),
        "requests_per_s": count * len(runs) / total,
        "output_tokens_per_s": generated / total,
        "tokens_per_s": computed / total,
        "preemptions": sum(each.num_preemptions for each in metrics),
    }


def _median(values: Iterator[float | None]) -> float:
    """Return the median of those that are there, 0 if none is."""
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else 0.0


def plot(document: Mapping[str, Any], path: str, pyplot: Any) -> None:
    """Draw seconds and tokens a second over the number of requests into ``path``."""
    rows = document["rows"]
    counts = [row["requests"] for row in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5))
    for name, label in (("median_s", "whole, median"), ("p90_s", "whole, p90"),
                        ("first_token_s", "first token, median")):  # fmt: skip
        left.plot(counts, [row[name] for row in rows], marker="o", label=label)
    left.set(xscale="log", yscale="log", xlabel="requests at once", ylabel="seconds")
    left.legend()
    right.plot(counts, [row["output_tokens_per_s"] for row in rows], marker="o")
    right.set(xscale="log", xlabel="requests at once", ylabel="generated tokens a second")
    for panel in (left, right):
        panel.set_xticks(counts, labels=map(str, counts))
        panel.set_xticks([], minor=True)
    figure.suptitle(f"{document['bench']}, platform {document['platform']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
