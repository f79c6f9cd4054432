"""Hardpoint's ``LLM`` on the cpu platform: scheduler, sampler and detokeniser included."""

from __future__ import annotations

import resource
import time
from typing import Any

from hardpoint.sampling_params import SamplingParams

from hardpoint_engine.llm import LLM


class Engine:
    """``keys`` are of the configuration."""

    def __init__(self, model: str, threads: int, keys: dict[str, Any]) -> None:
        settings = {"threads": threads, **keys.pop("cpu", {})}
        self._llm = LLM(
            model=model, platform="cpu", executor="uni", plugins={"cpu": settings}, **keys
        )
        self.vocab_size = self._llm.description.vocab_size
        self._llm.collective_rpc(watch)
        self._ran = 0.0

    def run(self, prompts: list[list[int]], new: int) -> int:
        """See ``serving_turns.Engine``."""
        params = SamplingParams(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True)
        begin = time.perf_counter()
        made = sum(len(each.outputs[0].token_ids) for each in self._llm.generate(prompts, params))
        self._ran += time.perf_counter() - begin
        return made

    def figures(self) -> dict[str, float]:
        """Return the seconds of all that ran since the last time this was asked, and those of them
        within the bare steps; the bytes of weights; the peak of memory.
        """
        ran, self._ran = self._ran, 0.0
        steps: dict[str, float] = self._llm.collective_rpc(watched)[0]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"ran_s": ran, "peak_bytes": float(peak), **steps}

    def close(self) -> None:
        """End it."""
        self._llm.shutdown()


def watch(worker: Any) -> None:
    """Time the bare steps of a worker from now on: the calls of its native program, or where it has
    none its model and its sampler.
    """
    runner = worker.get_model_runner()
    program = getattr(runner, "program", None)
    runner.bench_seconds = 0.0

    def timed(holder: Any, name: str) -> None:
        call = getattr(holder, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                runner.bench_seconds += time.perf_counter() - begin

        setattr(holder, name, run)

    if program is None:
        timed(runner, "forward")
        timed(runner.sampler, "sample")
    else:
        timed(program, "compute")
        timed(program, "choose")


def watched(worker: Any) -> dict[str, float]:
    """Return what :func:`watch` found since the last time."""
    runner = worker.get_model_runner()
    seconds, runner.bench_seconds = runner.bench_seconds, 0.0
    model = runner.get_model()
    held = {each.data_ptr(): each.nbytes for each in (*model.parameters(), *model.buffers())}
    return {"step_s": seconds, "weight_bytes": float(sum(held.values()))}
