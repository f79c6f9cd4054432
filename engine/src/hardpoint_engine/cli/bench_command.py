"""``hardpoint bench``, declared. Light: its help must not load the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from hardpoint.cli_options import configuration_options

from hardpoint_engine.cli.interruption import interruptible


@click.group(
    short_help="Measure what Hardpoint costs.",
    context_settings={"max_content_width": 100},
)
def bench() -> None:
    """Measure what Hardpoint costs: rpc beside its peers, latency and throughput by itself.

    Machines drift: trust ratios within a run, not figures of two.
    """


@bench.command(
    short_help="Calls of all workers, beside peers.", context_settings={"max_content_width": 100}
)
@click.option("--quick", is_flag=True, help="few calls, one and two workers: does it all work?")
@click.option("--json", "as_json", is_flag=True, help="print one JSON document")
@click.option("--plot", metavar="FILE.png", help="draw the medians, too (needs matplotlib)")
@click.option("--workers", metavar="N,...", help="numbers of workers [default: 1,2,4,8]")
@click.option(
    "--transport",
    "transports",
    multiple=True,
    metavar="NAME",
    help="only this one; may be repeated",
)
@click.option("--checks/--no-checks", default=True, help="take the figures that are not calls, too")
@click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="NAME=PYTHON",
    help="an interpreter that can import the peer: vllm or ray; may be repeated",
)
def rpc(
    quick: bool,
    as_json: bool,
    plot: str | None,
    workers: str | None,
    transports: tuple[str, ...],
    checks: bool,
    peers: tuple[str, ...],
) -> None:
    """Time a call of every worker through the executor mp (hardpoint-mp) on the dummy platform,
    beside multiprocessing.Pipe (pipe), pyzmq (zmq) and vLLM's MessageQueue (vllm-mq), and through
    the executors ray (hardpoint-ray) and ray_legacy (hardpoint-ray-legacy: steps) beside calls of
    Ray's actors (ray) and its compiled graphs (ray-graph), those that can be imported.

    Every worker gets a payload and answers with its last byte; the driver gathers the answers. Mode
    busy calls back to back, sporadic once each 5 ms. Then: the CPU time of idle workers, how soon a
    killed worker is noticed, the pause between two steps, how long workers take to start.
    """
    with interruptible():
        from hardpoint_engine.cli.bench_rpc import run

        run(
            quick=quick,
            as_json=as_json,
            plot_path=plot,
            workers=workers,
            transports=transports,
            checks=checks,
            peers=peers,
        )


@bench.command(
    short_help="The cpu platform, beside peers.", context_settings={"max_content_width": 100}
)
@click.option("--model", metavar="FILE.gguf", help="default: the installed default model")
@click.option("--folder", metavar="DIR", help="keep the files of all formats there")
@click.option("--formats", metavar="NAME,...", help="[default: fp32,bf16,w8a8,Q8_0,Q4_0,Q4_1]")
@click.option("--cases", metavar="NAME,...", help="which of B1, B16, B64, P [default: all]")
@click.option("--repeats", type=click.IntRange(min=1), default=3, help="turns that count")
@click.option("--threads", type=click.IntRange(min=1), default=2, help="of every engine")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="begin no turn that would end later; one of each is always taken",
)
@click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="NAME=PYTHON",
    help="vllm, llama.cpp or transformers, and an interpreter that has it; may be repeated",
)
@click.option("--compiled/--eager", default=True, help="vLLM with its compiler, too")
@click.option("--json", "as_json", is_flag=True, help="print one JSON document")
@click.option("--plot", "plot_path", metavar="FILE.png", help="draw it, too (needs matplotlib)")
def cpu(**options: Any) -> None:
    """Count the tokens a second that the cpu platform decodes at batch 1, 16 and 64 and reads in a
    prompt of 1,000, beside vLLM, transformers and llama.cpp, those that are named or installed.

    All have the same weights, made from one GGUF file in every format, and as many threads. They
    take turns, each in a process of its own.
    """
    with interruptible():
        from hardpoint_engine.cli.bench_cpu import run

        run(**options)


def serving_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``command`` with what the measurements of one engine have in common."""
    least = click.IntRange(min=1)
    for flag, about in (
        ("--num-iters", "runs that count, for each number of requests"),
        ("--output-len", "tokens of an answer (throughput: on average)"),
        ("--input-len", "tokens of a prompt (throughput: on average)"),
    ):
        command = click.option(flag, type=least, metavar="N", help=about)(command)
    command = click.option(
        "--plot", "plot_path", metavar="FILE.png", help="draw the figures, too (needs matplotlib)"
    )(command)
    return click.option("--json", "as_json", is_flag=True, help="print one JSON document")(command)


def counts_option(flag: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds ``flag``, the numbers of requests that come at once."""
    about = "numbers of requests at once"
    return click.option(flag, "counts", metavar="N,...", callback=_counts, help=about)


def _counts(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    if value is None:
        return None
    numbers = tuple(int(part) if part.strip().isdigit() else 0 for part in value.split(","))
    if not all(numbers):
        raise click.BadParameter(f"numbers of requests, not {value!r}")
    return numbers


@bench.command(
    short_help="Seconds of a batch of this engine.", context_settings={"max_content_width": 100}
)
@counts_option("--batch-size")
@serving_options
@configuration_options
def latency(**options: Any) -> None:
    """Time batches of requests that come at once: the whole, the time to the first token (TTFT),
    the time per output token after it (TPOT).

    All flags of the configuration hold, as for hardpoint generate. Prompts are random tokens.
    """
    _measure("latency", options)


@bench.command(
    short_help="Tokens a second of this engine.", context_settings={"max_content_width": 100}
)
@counts_option("--num-prompts")
@serving_options
@configuration_options
def throughput(**options: Any) -> None:
    """Count the tokens a second of many requests of mixed length that come at once.

    All flags of the configuration hold, as for hardpoint generate. Prompts are random tokens.
    """
    _measure("throughput", options)


def _measure(name: str, options: dict[str, Any]) -> None:
    numbers = {key: options.pop(key) for key in ("input_len", "output_len", "num_iters")}
    more = {key: options.pop(key) for key in ("counts", "as_json", "plot_path")}
    with interruptible():
        from hardpoint_engine.cli.bench_serving import run

        run(name, options, numbers=numbers, **more)
