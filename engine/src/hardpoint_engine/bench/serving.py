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
    """What is measured: for each of ``counts``, numbers of requests that come at once,
    ``num_iters`` times after ``num_iters_warmup`` that do not count. Prompts are random ids, none
    alike, so that none is cached. ``counted`` is what rows call that number.
    """

    counted: str
    counts: tuple[int, ...]
    input_len: int = 32
    output_len: int = 32
    num_iters: int = 5
    num_iters_warmup: int = 1
    varied: bool = False
    """Whether lengths are drawn, from a half of those numbers to one and a half."""


LATENCY = ServingPlan(counted="batch_size", counts=(1, 2, 4, 8))
THROUGHPUT = ServingPlan(counted="num_prompts", counts=(1, 8, 64), num_iters=3, varied=True)


def measure(llm: LLM, plan: ServingPlan, name: str, tell: Callable[[str], None]) -> Row:
    """Return the whole document. Times are in the unit of their name."""
    draw = random.Random(SEED)  # noqa: S311 - lengths and ids, not keys
    rows = []
    for count in plan.counts:
        every = plan.num_iters_warmup + plan.num_iters
        runs = [_run(llm, plan, count, draw) for _ in range(every)]
        rows.append({plan.counted: count, **_figures(count, runs[plan.num_iters_warmup :])})
        tell(line_of(rows[-1]))
    return {
        "bench": name,
        "model": str(llm.description.path),
        "platform": llm.platform.name,
        "input_len": plan.input_len,
        "output_len": plan.output_len,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "rows": rows,
    }


def line_of(row: Mapping[str, Any]) -> str:
    """Return one row as text."""
    count = count_of(row)
    requests = "request: " if count == 1 else "requests:"
    return (
        f"{count:5} {requests} {row['median_latency_s']:8.3f} s (p90 "
        f"{row['p90_latency_s']:.3f}), TTFT {row['median_ttft_ms']:8.1f} ms, TPOT "
        f"{row['median_tpot_ms']:7.2f} ms, {row['output_throughput']:8.1f} tokens/s"
    )


def count_of(row: Mapping[str, Any]) -> int:
    """Return how many requests a row is of."""
    found: int = row.get(LATENCY.counted) or row[THROUGHPUT.counted]
    return found


def _run(
    llm: LLM, plan: ServingPlan, count: int, draw: random.Random
) -> tuple[float, Sequence[RequestOutput]]:
    """Return how long one batch took, and its results."""
    vocab_size = llm.description.vocab_size
    prompts = [
        [draw.randrange(vocab_size) for _ in range(_length(plan.input_len, plan, draw))]
        for _ in range(count)
    ]
    lengths = [_length(plan.output_len, plan, draw) for _ in range(count)]
    params = [
        SamplingParams(temperature=0, max_tokens=length, min_tokens=length, ignore_eos=True)
        for length in lengths
    ]
    begin = time.perf_counter()
    results = llm.generate(prompts, params)
    return time.perf_counter() - begin, results


def _length(mean: int, plan: ServingPlan, draw: random.Random) -> int:
    return max(1, draw.randint(mean // 2, mean + mean // 2)) if plan.varied else mean


def _figures(count: int, runs: Sequence[tuple[float, Sequence[RequestOutput]]]) -> Row:
    """Return what was measured: latency is that of the whole batch; times to the first token
    (TTFT) and per output token after it (TPOT) are medians over all requests; throughputs are
    a second.
    """
    seconds = sorted(taken for taken, _ in runs)
    metrics = [result.metrics for _, results in runs for result in results if result.metrics]
    total = sum(seconds)
    generated = sum(each.num_generation_tokens for each in metrics)
    computed = sum(each.num_prompt_tokens + each.num_generation_tokens for each in metrics)
    return {
        "num_iters": len(runs),
        "median_latency_s": statistics.median(seconds),
        "p90_latency_s": seconds[min(len(seconds) - 1, int(0.9 * len(seconds)))],
        "median_ttft_ms": 1e3 * _median(each.time_to_first_token for each in metrics),
        "median_tpot_ms": 1e3 * _median(each.time_per_output_token for each in metrics),
        "request_throughput": count * len(runs) / total,
        "output_throughput": generated / total,
        "total_token_throughput": computed / total,
        "num_preemptions": sum(each.num_preemptions for each in metrics),
    }


def _median(values: Iterator[float | None]) -> float:
    """Return the median of those that are there, 0 if none is."""
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else 0.0


def plot(document: Mapping[str, Any], path: str, pyplot: Any) -> None:
    """Draw seconds and tokens a second over the number of requests into ``path``."""
    rows = document["rows"]
    counts = [count_of(row) for row in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5))
    for name, unit, label in (
        ("median_latency_s", 1.0, "latency, median"),
        ("p90_latency_s", 1.0, "latency, p90"),
        ("median_ttft_ms", 1e-3, "TTFT, median"),
    ):
        left.plot(counts, [row[name] * unit for row in rows], marker="o", label=label)
    left.set(xscale="log", yscale="log", xlabel="requests at once", ylabel="seconds")
    left.legend()
    right.plot(counts, [row["output_throughput"] for row in rows], marker="o")
    right.set(xscale="log", xlabel="requests at once", ylabel="generated tokens a second")
    for panel in (left, right):
        panel.set_xticks(counts, labels=map(str, counts))
        panel.set_xticks([], minor=True)
    figure.suptitle(f"{document['bench']}, platform {document['platform']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
