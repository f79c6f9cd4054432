"""``hardpoint bench``, declared. Light: its help must not load the engine."""

from __future__ import annotations

import click

from hardpoint_engine.cli.interruption import interruptible


@click.group(
    short_help="Measure what Hardpoint costs, beside its peers.",
    context_settings={"max_content_width": 100},
)
def bench() -> None:
    """Measure what Hardpoint costs, beside its peers, all in one run.

    Machines drift: trust ratios within a run, not figures of two.
    """


@bench.command(short_help="Calls of all workers.", context_settings={"max_content_width": 100})
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
@click.option("--vllm-python", metavar="PATH", help="an interpreter that can import vLLM")
@click.option("--ray-python", metavar="PATH", help="an interpreter that can import Ray")
def rpc(
    quick: bool,
    as_json: bool,
    plot: str | None,
    workers: str | None,
    transports: tuple[str, ...],
    checks: bool,
    vllm_python: str | None,
    ray_python: str | None,
) -> None:
    """Time a call of every worker through the executor mp (hardpoint-mp) on the dummy platform,
    beside multiprocessing.Pipe (pipe), pyzmq (zmq), Ray actors (ray) and vLLM's MessageQueue
    (vllm-mq), those that can be imported.

    Every worker gets a payload and answers with its last byte; the driver gathers the answers. Mode
    busy calls back to back, sporadic once each 5 ms. Then: the CPU time of idle workers, how soon a
    killed worker is noticed, the pause between two steps, how long workers take to start.
    """
    pythons = {"vllm-mq": vllm_python, "ray": ray_python}
    with interruptible():
        from hardpoint_engine.cli.bench_rpc import run

        run(
            quick=quick,
            as_json=as_json,
            plot_path=plot,
            workers=workers,
            transports=transports,
            checks=checks,
            pythons={name: path for name, path in pythons.items() if path},
        )
