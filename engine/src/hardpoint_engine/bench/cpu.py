"""``hardpoint bench cpu``: tokens a second of the cpu platform, beside other engines.

Every engine has a process of its own, in the interpreter that has it, for each format of weights.
They take turns over the same cases, with the same weights and as many threads, and the next one
begins when the last is at rest.
"""

from __future__ import annotations

import datetime as dt
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from attrs import evolve, field, frozen

from hardpoint_engine.bench import cpu_bounds
from hardpoint_engine.bench.bandwidth import read_bandwidth
from hardpoint_engine.bench.cpu_race import Race, Tell, Times
from hardpoint_engine.bench.model_files import GGUF_TYPES, ModelFiles

OURS: Final = "hardpoint"
ENGINES: Final[Mapping[str, str]] = {
    OURS: "ours.py",
    "vllm": "vllm_offline.py",
    "transformers": "transformers_generate.py",
    "llama.cpp": "llama_cpp_batches.py",
}
"""Every engine, and its file in ``serving_engines``."""
PLAIN: Final[Mapping[str, str]] = {"fp32": "float32", "bf16": "bfloat16"}
QUANTISED: Final = ("int8", "w8a8", "w4a8")
OTHERWISE: Final[Mapping[str, str]] = {**dict.fromkeys(GGUF_TYPES[2:], "float"), "bf16": "bfloat16"}
"""Formats that our own engine has a second row of, named after the activations that they are
multiplied with there: GGUF's with its default, bf16 with those that vLLM and llama.cpp have.
"""
FORMATS: Final = (*PLAIN, *QUANTISED, *GGUF_TYPES[2:])
DEFAULT_FORMATS: Final = ("fp32", "bf16", "w8a8", "Q8_0", "Q4_0", "Q4_1")
KV_BLOCKS: Final = 256
"""Blocks of 16 tokens of our KV cache. Most are taken by 64 sequences of 16 + 16 tokens: 2 each,
and a third that a step may ask ahead; the longest sequence there may be, 2048 tokens, takes 128.
"""

Row = dict[str, Any]
Document = dict[str, Any]


@frozen(kw_only=True)
class Case:
    """A batch: so many prompts of ``length`` tokens, ``new`` tokens after each."""

    phase: str
    batch: int
    length: int
    new: int

    @property
    def tokens(self) -> int:
        """What is counted: tokens made, of a prefill those read."""
        return self.batch * (self.length if self.phase == "prefill" else self.new)

    @property
    def warm_up(self) -> Case:
        """A short turn of the same shapes."""
        return evolve(self, new=min(self.new, 2))


CASES: Final[Mapping[str, Case]] = {
    "B1": Case(phase="decode", batch=1, length=16, new=64),
    "B16": Case(phase="decode", batch=16, length=16, new=32),
    "B64": Case(phase="decode", batch=64, length=16, new=16),
    "P": Case(phase="prefill", batch=1, length=1000, new=1),
}
"""Decoding counts the prefill of its 16-token prompts, for all engines."""


@frozen(kw_only=True)
class CpuPlan:
    """What is measured. ``peers``: engine -> interpreter. ``repeats`` turns count, one more warms
    up.
    """

    formats: Sequence[str] = DEFAULT_FORMATS
    cases: Sequence[str] = tuple(CASES)
    repeats: int = 3
    threads: int = 2
    peers: Mapping[str, str] = field(factory=dict)
    compiled: bool = True
    """Whether vLLM runs with its compiler, too; its best counts."""
    minutes: float | None = None
    """No turn that would end later than so many minutes after the start is begun, but for the first
    that counts.
    """


@frozen(kw_only=True)
class Runner:
    """One process to be: an engine with the weights in one format, in one way."""

    engine: str
    format: str
    way: str = ""
    arguments: str
    """The options of its engine's class, as JSON."""

    @property
    def is_ours(self) -> bool:
        """Whether it is the engine that is held against the others."""
        return self.engine == OURS

    @property
    def rivals(self) -> tuple[str, str]:
        """Equal for those of which the fastest counts: llama.cpp is compared within a format."""
        return self.engine, self.format if self.engine in (OURS, "llama.cpp") else ""

    @property
    def name(self) -> str:
        """How it is told."""
        return " ".join(each for each in (self.engine, self.format, self.way) if each)


def runners(plan: CpuPlan, files: ModelFiles) -> Iterator[Runner]:
    """Yield every process that is wanted; their files are made."""
    engines = [OURS, *plan.peers]
    for kind in plan.formats:
        for engine in engines:
            for way, options in _ways(engine, kind, plan, files):
                arguments = json.dumps({"threads": plan.threads, **options})
                yield Runner(engine=engine, format=kind, way=way, arguments=arguments)
        if (other := OTHERWISE.get(kind)) is not None:
            options = {"threads": plan.threads, **_ours(kind, files, other)}
            yield Runner(engine=OURS, format=f"{kind}-{other}", arguments=json.dumps(options))


def _ways(
    engine: str, kind: str, plan: CpuPlan, files: ModelFiles
) -> Iterator[tuple[str, dict[str, Any]]]:
    dtype = PLAIN.get(kind)
    if engine == OURS:
        yield "", _ours(kind, files)
    elif engine == "llama.cpp":
        if kind not in QUANTISED:
            named = {"fp32": "F32", "bf16": "BF16"}.get(kind, kind)
            yield "", {"model": str(files.gguf(named))}
    elif dtype is not None:
        options = {"model": str(files.safetensors()), "dtype": dtype}
        if engine == "transformers":
            yield "", options
        else:
            yield "eager", {**options, "eager": True}
            if plan.compiled:
                yield "compiled", {**options, "eager": False}


def _ours(kind: str, files: ModelFiles, activations: str | None = None) -> dict[str, Any]:
    """``activations``: those that weights are multiplied with; else blocks of a GGUF file as by
    llama.cpp, with int8, and others with float.
    """
    keys: dict[str, Any] = {
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "block_size": 16,
        "num_kv_blocks": KV_BLOCKS,
        "cpu": {"native": "auto"},
    }
    keys["cpu"]["activations"] = activations or ("int8" if kind in GGUF_TYPES else "float")
    if kind in PLAIN:
        return {"model": str(files.safetensors()), "keys": {**keys, "dtype": PLAIN[kind]}}
    if kind in QUANTISED:
        return {"model": str(files.safetensors()), "keys": {**keys, "quantization": kind}}
    return {"model": str(files.gguf(kind)), "keys": keys}


def measure(plan: CpuPlan, files: ModelFiles, tell: Tell) -> Document:
    """Measure every engine that is to be had. Return ``rows``, ``ratios``, ``figures`` of our own
    engine by format, the ``bounds`` of both, ``turns`` that count of all, ``cut`` (what ended it
    early, or None), ``once`` (name, case and why of those that had one turn and no more),
    ``idle_cpu_share`` (cores that engines at rest used while another had its turn) and ``skipped``
    (engine -> why).

    Called by the command. ``tell`` gets a line for each stage. Whoever fails is left out from then
    on. KeyboardInterrupt ends the turns, and goes on to the caller if there was none that counts.
    Raises TransportFailedError if our own engine fails in every format.
    """
    skipped = {name: "not named" for name in ENGINES if name not in (OURS, *plan.peers)}
    at = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    with Race(plan, {name: CASES[name] for name in plan.cases}, skipped, tell) as race:
        race.start(runners(plan, files), ENGINES)
        race.run()
        told = race.figures(CASES["B1"])
    rows = rows_of(race.times, at)
    read = read_bandwidth(plan.threads)
    ours = [row for row in rows if row["engine"] == OURS]
    figures = {kind: cpu_bounds.figures_of(each, kind, ours, read) for kind, each in told.items()}
    judged = cpu_bounds.judged_ratios(ratios(rows))
    cells = [(CASES[name].phase, CASES[name].batch) for name in plan.cases]
    return {
        "rows": rows,
        "ratios": judged,
        "figures": figures,
        "bounds": [
            *cpu_bounds.ratio_bounds(judged, plan.formats, cells),
            *cpu_bounds.judged_figures(figures),
        ],
        "turns": race.turns,
        "cut": race.cut,
        "once": race.once,
        "idle_cpu_share": race.idle_cpu_share,
        "read_bytes_per_s": read,
        "skipped": skipped,
    }


def rows_of(times: Times, at: str) -> list[Row]:
    """Return a row for each engine, format and case, of the median of its turns; of several ways to
    run an engine the best one's.
    """
    best: dict[tuple[str, str, str], float] = {}
    for runner, cases in times.items():
        for name, seconds in cases.items():
            key = (runner.engine, runner.format, name)
            speed = CASES[name].tokens / statistics.median(seconds)
            best[key] = max(best.get(key, 0.0), speed)
    return [
        {
            "engine": engine,
            "format": kind,
            "phase": CASES[name].phase,
            "batch": CASES[name].batch,
            "tokens_per_s": round(speed, 1),
            "at": at,
        }
        for (engine, kind, name), speed in best.items()
    ]


def ratios(rows: Sequence[Row]) -> list[Row]:
    """Return what our engine's speed is as a multiple of each other's best that it is held against:
    in the same format of llama.cpp's, whatever the activations; of the others in any.
    """
    found: list[Row] = []
    for row in rows:
        if row["engine"] != OURS:
            continue
        for engine in ENGINES:
            speeds = [
                other["tokens_per_s"] for other in rows
                if engine == other["engine"] != OURS
                and (other["phase"], other["batch"]) == (row["phase"], row["batch"])
                and (engine != "llama.cpp" or other["format"] == cpu_bounds.base(row["format"]))
            ]  # fmt: skip
            if speeds:
                ratio = round(row["tokens_per_s"] / max(speeds), 3)
                cell = {key: row[key] for key in ("format", "phase", "batch")}
                found.append({**cell, "against": engine, "ratio": ratio})
    return found
