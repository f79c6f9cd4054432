"""One step of ``gpu_check.sh``: ``gpu_steps.py NAME`` prints one JSON object, its outcome in it.
Here are the steps with engines.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path

import attrs
from gpu_device import collectives, driver_memory, kernels, pools, streams, triton_says
from gpu_house import FOUND, FailedError, House, SkippedError, on_worker, same, so_far


def probe(house: House) -> dict:
    """The verdict, whether Triton compiles, and the worker's figures of memory beside the driver's,
    with graphs as by default.
    """
    keys: dict = {"num_kv_blocks": None, "graph_mode": None}
    if house.dry:
        little = {"substitute": "host", "substitute_bytes": 2 << 30}
        keys |= {"graph_mode": "full_and_piecewise", "plugins": {"cuda": little}}
    else:
        import torch
        from hardpoint_cuda.platform import CudaPlatform

        verdict = CudaPlatform().probe()
        so_far({"verdict": verdict.reason})
        if not verdict.available or torch.cuda.is_initialized():
            raise FailedError(f"{verdict}; initialised: {torch.cuda.is_initialized()}")
        so_far({"triton": triton_says()})
    with house.start(**keys) as llm:
        figures = on_worker(llm, _memory)
        so_far(figures)
        driver = {"reason": "host memory has none"} if house.dry else driver_memory()
    so_far({"driver": driver})
    total, held = figures["total"], figures["held"]
    if not 0 < held <= total:
        raise FailedError(f"{held} of {total} bytes are held")
    for name, found in (("total", total), ("used", held)):
        told = driver.get(name, found)
        if abs(told - found) > 0.02 * total + (1 << 30):
            raise FailedError(f"{name}: {found} bytes, the driver says {told}")
    return {}


def _memory(worker) -> dict:
    snapshot, runner, profile = worker.device.snapshot(), worker.model_runner, worker.memory_profile
    report = getattr(runner.graphs, "report", None)
    return {
        "total": snapshot.total,
        "held": snapshot.total - snapshot.free,
        "reserved": snapshot.reserved,
        "budget": worker.budget,
        "profile": attrs.asdict(profile) | {"available": profile.available},
        "graphs": {
            "set aside": runner.graph_memory,
            "taken": None if report is None else report.num_bytes,
            "number": None if report is None else report.graphs,
        },
    }


def greedy(house: House) -> dict:
    """Token ids of the GPU in float32 beside those of the processor."""
    with house.start("cpu") as llm:
        expected = house.ids(llm)
    with house.start() as llm:
        found = house.ids(llm)
        chosen = on_worker(llm, _choices)
        equal = sum(a == b for a, b in zip(found, expected, strict=True))
        so_far({"equal": equal, "of": len(expected), "operations": chosen})
        prompts = [
            _shared(*each) for each in zip(house.prompts, found, expected, strict=True)
            if each[1] != each[2]
        ]  # fmt: skip
        apart = [{"prompt": p[0], "position": p[1], "gpu": _best(llm, p[2])} for p in prompts]
    if apart:
        so_far({"apart": apart})
        with house.start("cpu") as llm:
            for each, prompt in zip(apart, prompts, strict=True):
                each["cpu"] = _best(llm, prompt[2])
        raise FailedError(f"other ids: {json.dumps(apart)}; {found} instead of {expected}")
    if not house.dry and not chosen["attention"].startswith("hardpoint_runtime.kernels"):
        raise FailedError(f"the kernels are not in use: {chosen}")
    return {}


def _shared(prompt: list[int], found: list[int], expected: list[int]) -> tuple[int, int, list[int]]:
    """Return (tokens of the prompt, where the first other token is, all tokens before it)."""
    pairs = enumerate(zip(found, expected, strict=True))
    position = next(place for place, (a, b) in pairs if a != b)
    return len(prompt), position, prompt + expected[:position]


def _best(llm, tokens: list[int]) -> dict:
    """Return the two most likely next tokens, and how far apart their log-probabilities are."""
    from hardpoint_engine import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2, ignore_eos=True)
    scores = llm.generate([tokens], params)[0].outputs[0].logprobs[0]
    best = sorted(((told.logprob, token) for token, told in scores.items()), reverse=True)[:2]
    return {"tokens": [token for _, token in best], "gap": best[0][0] - best[1][0]}


def _choices(worker) -> dict:
    choices = worker.model_runner.operations.choices
    return {each.name: "; ".join((each.reference, *each.passed_over)) for each in choices}


def graphs(house: House) -> dict:
    """Captured and replayed steps give the ids of eager ones, in every mode: with a size for whole
    prompts, and (the default mode) with the default sizes.
    """
    few = house.prompts[:2]  # at most the tokens of the largest default size
    with house.start() as llm:
        expected, of_few = house.ids(llm), house.ids(llm, few)
    sizes = (1, 2, 4, 128)
    faults = []
    for mode, given in (
        ("full_and_piecewise", None), ("full", sizes), ("piecewise", sizes),
        ("full_decode_only", sizes),
    ):  # fmt: skip
        try:
            _replayed(house, mode, given, (None, expected), (None, expected), (few, of_few))
        except Exception as error:  # noqa: BLE001 - the other modes are to be tried, too
            traceback.print_exc()
            faults.append(f"{mode}: {type(error).__name__}: {error}"[:1000])
            so_far({"faults": faults})
        gc.collect()
    if faults:
        raise FailedError("; ".join(faults))
    return {}


def _replayed(house: House, mode: str, sizes: tuple[int, ...] | None, *turns) -> None:
    """Generate by graphs of ``mode``: each turn is (prompts, their ids)."""
    started = time.perf_counter()
    with house.start(graph_mode=mode, graph_sizes=sizes) as llm:
        seconds = round(time.perf_counter() - started, 2)
        found = [house.ids(llm, prompts) for prompts, _ in turns]
        told = on_worker(llm, _replays)
    so_far({mode: {"start_seconds": seconds, **told}})
    for turn, (ids, (_, expected)) in enumerate(zip(found, turns, strict=True)):
        same(ids, expected, f"turn {turn}")
    parts = {"full": {"FULL"}, "piecewise": {"PIECEWISE"}, "full_decode_only": {"FULL"}}
    for part in parts.get(mode, {"FULL", "PIECEWISE"}):
        if not told["steps"].get(part):
            raise FailedError(f"no step replayed a {part} graph")
    eager = [tokens for tokens in told["eager_tokens"] if tokens <= max(told["sizes"])]
    if eager and mode != "full_decode_only":
        raise FailedError(f"steps of {eager} tokens ran eagerly")


def _replays(worker) -> dict:
    graphs = worker.model_runner.graphs
    return {
        "steps": {mode.name: count for mode, count in graphs.counts.steps.items()},
        "eager_tokens": sorted(graphs.counts.unknown),
        "sizes": sorted({each.key.num_tokens for each in graphs.plan.graphs}),
        "graphs": graphs.report.graphs,
        "seconds": round(graphs.report.seconds, 3),
        "bytes": graphs.report.num_bytes,
    }


def sleep(house: House) -> dict:
    """Bytes that sleep gives back, and addresses afterwards; graphs replay as before."""
    told = {}
    with house.start(must_sleep=True, graph_mode="full_decode_only", graph_sizes=(1, 2, 4)) as llm:
        expected = house.ids(llm)
        for level in (1, 2):
            before = on_worker(llm, _held)
            llm.sleep(level)
            asleep = on_worker(llm, lambda worker: worker.device.memory_held())
            if level == 1:
                llm.wake_up()
            else:
                llm.wake_up(["weights", "kv_cache"])
                llm.executor.reload_weights()
                llm.wake_up(["scheduling"])
            after = on_worker(llm, _held)
            same(after["addresses"], before["addresses"], f"addresses after level {level}")
            llm.reset_prefix_cache()
            same(house.ids(llm), expected, f"ids after level {level}")
            share = (before["held"] - asleep) / before["tagged"]
            told[f"level {level}"] = {
                "held": before["held"],
                "asleep": asleep,
                "freed_share": share,
            }
            so_far(told)
            if share < 0.8 and not house.dry:
                raise FailedError(json.dumps(told))
    return told


def _held(worker) -> dict:
    runner = worker.model_runner
    tensors = dict(runner.model.named_parameters())
    caches = {
        f"{name}.{part}": getattr(cache, part)
        for name, cache in runner.kv_cache.layers.items()
        for part in ("key", "value")
    }
    every = tensors | caches
    tagged = sum(
        {each.data_ptr(): each.numel() * each.element_size() for each in every.values()}.values()
    )
    return {"held": worker.device.memory_held(), "tagged": tagged,
            "addresses": {name: each.data_ptr() for name, each in every.items()}}  # fmt: skip


def nursery(house: House) -> dict:
    """Worker processes start and answer, also after this process has used the GPU."""
    told = {}
    with house.start(executor="mp") as llm:
        expected = house.ids(llm)
        told["pid"] = on_worker(llm, lambda worker: os.getpid()) != os.getpid()
    so_far(told)
    if not told["pid"]:
        raise FailedError("the worker is in the driver's process")
    if house.dry:
        return told
    import torch

    torch.zeros(1, device="cuda")
    try:
        with house.start(executor="mp") as llm:
            same(house.ids(llm), expected, "after the driver took the GPU")
        told["after"] = "equal ids"
    except FailedError:
        raise
    except Exception as error:
        told["after"] = f"refused: {error}"
        if "fork" not in str(error):
            raise
    return told


def speed(house: House) -> dict:
    """Decode in bfloat16: eager beside graphs, at batch 1 and 16."""
    told = {}
    batches, new, turns = ((1, 4), 4, 1) if house.dry else ((1, 16), 64, 3)
    for mode in ("none", "full_decode_only"):
        sizes = {} if mode == "none" else {"graph_sizes": (1, 2, 4) if house.dry else (1, 8, 16)}
        with house.start(
            dtype="float32" if house.dry else "bfloat16", graph_mode=mode, **sizes
        ) as llm:
            for batch in batches:
                rate = batch * new / house.seconds(llm, batch, new, turns)
                told[f"{mode}, batch {batch}"] = round(rate, 1)
                so_far({"tokens_per_second": told})
        gc.collect()
    return {}


def bandwidth(house: House) -> dict:
    """Weights read per second while decoding at batch 1, beside what a copy reads and writes."""
    import torch

    new = 4 if house.dry else 128
    dtype, mode = ("float32", "none") if house.dry else ("bfloat16", "full_decode_only")
    with house.start(
        dtype=dtype, graph_mode=mode, **({} if house.dry else {"graph_sizes": (1,)})
    ) as llm:
        num_bytes = on_worker(llm, lambda worker: sum(
            each.numel() * each.element_size() for each in worker.model_runner.model.parameters()
        ))  # fmt: skip
        rate = new / house.seconds(llm, 1, new, 1 if house.dry else 3)
    device = "cpu" if house.dry else "cuda"
    source = torch.zeros((1 << 22) if house.dry else (1 << 31), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        if not house.dry:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    copied = 2 * source.numel() / statistics.median(taken)
    return {
        "weight_bytes": num_bytes,
        "tokens_per_second": round(rate, 1),
        "copy_bytes_per_second": round(copied),
        "share": round(num_bytes * rate / copied, 4),
    }


def transformers(house: House) -> dict:
    """Decode at batch 16 beside transformers' own generate, on the same weights."""
    import importlib.util

    if importlib.util.find_spec("transformers") is None:
        raise SkippedError("transformers is not installed")
    import torch
    from hardpoint.default_model import find_default_model
    from transformers import AutoModelForCausalLM

    batch, new = (2, 4) if house.dry else (16, 64)
    dtype, device = ("float32", "cpu") if house.dry else ("bfloat16", "cuda")
    more = {} if house.dry else {"graph_mode": "full_decode_only", "graph_sizes": (16,)}
    with house.start(dtype=dtype, **more) as llm:
        ours = batch * new / house.seconds(llm, batch, new, 1 if house.dry else 3)
    gc.collect()
    folder, _, name = str(house.model or find_default_model()).rpartition("/")
    source = {"gguf_file": name} if name.endswith(".gguf") else {}
    path = folder if source else f"{folder}/{name}"
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), **source)
    except TypeError:  # before 4.56 it has another name
        kind = {"torch_dtype": getattr(torch, dtype)}
        model = AutoModelForCausalLM.from_pretrained(path, **kind, **source)
    model = model.to(device).eval()
    ids = torch.arange(batch * 16, device=device).view(batch, 16) % 90
    taken = []
    for _ in range(2 if house.dry else 3):
        started = time.perf_counter()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                             max_new_tokens=new, min_new_tokens=new, pad_token_id=0)  # fmt: skip
        out.cpu()
        taken.append(time.perf_counter() - started)
    theirs = batch * new / min(taken)
    return {
        "ours": round(ours, 1),
        "transformers": round(theirs, 1),
        "ratio": round(ours / theirs, 2),
    }


STEPS = {each.__name__: each for each in (
    pools, probe, greedy, graphs, sleep, kernels, streams, collectives, nursery, speed, bandwidth,
    transformers,
)}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--no-sleep", default="", help="why engines start without sleep")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            house = House(options.model, dry=options.dry_run, scratch=Path(scratch))
            house.no_sleep = options.no_sleep
            returned = STEPS[options.step](house)
            found = {"outcome": "ok", **FOUND, **returned}
            if house.no_sleep:
                found["started without sleep, since with it"] = house.no_sleep
            if options.model is None and house.model is not None and not options.dry_run:
                found["model"] = "random, of the default model's shape: no default model is here"
        except SkippedError as reason:
            found = {"outcome": "skipped", "reason": str(reason)}
        except FailedError as reason:
            found = {"outcome": "failed", "reason": str(reason)[:3000], "so_far": FOUND}
        except Exception as error:  # noqa: BLE001 - the line says what it was
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"[:3000]
            found = {"outcome": "error", "reason": reason, "so_far": FOUND}
    print(json.dumps(found), flush=True)
    return int(found["outcome"] not in ("ok", "skipped"))


if __name__ == "__main__":
    sys.exit(main())
