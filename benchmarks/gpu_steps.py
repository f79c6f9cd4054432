"""One step of ``gpu_check.sh``: ``gpu_steps.py NAME`` prints one JSON object, its outcome in it."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

PROMPTS = [[1000 + 7 * n + 3 * place for place in range(length)]
           for n, length in enumerate((5, 17, 33, 64))]  # fmt: skip
TINY_PROMPTS = [[token % 90 for token in prompt] for prompt in PROMPTS]
NEW = 24


class FailedError(Exception):
    """What was to be shown is not so."""


class SkippedError(Exception):
    """This step cannot run here, for a reason that is no fault."""


TINY = {"hidden": 32, "inner": 48, "heads": 4, "kv_heads": 2, "vocabulary": 97, "layers": 2}
LIKE_DEFAULT = {
    "hidden": 576, "inner": 1536, "heads": 9, "kv_heads": 3, "vocabulary": 49152, "layers": 30,
}  # fmt: skip
"""The default model's shape: what takes its place where it could not be carried along."""


def random_model(folder: Path, hidden: int, inner: int, heads: int, kv_heads: int,
                 vocabulary: int, layers: int) -> str:  # fmt: skip
    """Write a random Llama, spread enough that it does not repeat itself, and a tokenizer; return
    its folder.
    """
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers, "vocab_size": vocabulary, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "hidden_act": "silu", "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"w{token}": token for token in range(vocabulary)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    generator = torch.Generator().manual_seed(0)
    narrow = hidden * kv_heads // heads
    shapes = {"model.embed_tokens": (vocabulary, hidden)}
    ones = ["model.norm"]
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "self_attn.q_proj": (hidden, hidden),
            at + "self_attn.o_proj": (hidden,) * 2,
        }
        shapes |= {at + f"self_attn.{each}_proj": (narrow, hidden) for each in "kv"}
        shapes |= {at + f"mlp.{each}_proj": (inner, hidden) for each in ("gate", "up")}
        shapes[at + "mlp.down_proj"] = (hidden, inner)
        ones += [at + "input_layernorm", at + "post_attention_layernorm"]
    weights = {
        f"{name}.weight": torch.randn(*shape, generator=generator) * (2.9 / hidden) ** 0.5
        for name, shape in shapes.items()
    }
    save_file(weights | {f"{n}.weight": torch.ones(hidden) for n in ones},
              str(folder / "model.safetensors"))  # fmt: skip
    return str(folder)


class House:
    """Engines for the steps: on the GPU, or (``dry``) on host memory with a tiny model."""

    def __init__(self, model: str | None, *, dry: bool, scratch: Path) -> None:
        self.dry = dry
        self.model = model
        if model == "random" or (model is None and (dry or not default_model_is_here())):
            self.model = random_model(scratch, **(TINY if dry else LIKE_DEFAULT))
        self.prompts = TINY_PROMPTS if dry else PROMPTS
        self.new = 6 if dry else NEW

    def start(self, platform: str = "cuda", **keys: object):
        from hardpoint_engine import LLM

        given = {"executor": "uni", "dtype": "float32", "max_model_len": 160 if self.dry else 1024,
                 "max_num_seqs": 4 if self.dry else 32, "graph_mode": "none"}  # fmt: skip
        if self.dry:
            given |= {"max_num_batched_tokens": 256, "num_kv_blocks": 64}
            if platform == "cuda":
                given["plugins"] = {"cuda": {"substitute": "host", "substitute_bytes": 8 << 30}}
        return LLM(model=self.model, platform=platform, **{**given, **keys})

    def ids(self, llm, prompts=None, new=None) -> list[list[int]]:
        """Generate greedily."""
        from hardpoint_engine import SamplingParams

        new = new or self.new
        params = SamplingParams(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True)
        return [
            list(each.outputs[0].token_ids)
            for each in llm.generate(prompts or self.prompts, params)
        ]

    def seconds(self, llm, batch: int, new: int, turns: int) -> float:
        """Return the least seconds of some turns, each with other prompts."""
        most = 90 if self.dry else 40000
        taken = []
        for turn in range(turns + 1):
            prompts = [[(turn * 131 + row * 17 + place * 7) % most for place in range(16)]
                       for row in range(batch)]  # fmt: skip
            started = time.perf_counter()
            self.ids(llm, prompts, new)
            taken.append(time.perf_counter() - started)
        return min(taken[1:])


def default_model_is_here() -> bool:
    from hardpoint.default_model import find_default_model
    from hardpoint.errors import ConfigError

    try:
        find_default_model()
    except ConfigError:
        return False
    return True


def so_far(told: dict) -> None:
    """Leave what a step has found, should it be cut."""
    print(json.dumps(told), flush=True)


def same(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise FailedError(f"{what}: {found} instead of {expected}")


def on_worker(llm, function: Callable) -> object:
    return llm.collective_rpc(function)[0]


def probe(house: House) -> dict:
    """The verdict, and the worker's figures of memory beside the driver's."""
    import torch
    from hardpoint_cuda.platform import CudaPlatform

    found: dict = {}
    if not house.dry:
        verdict = CudaPlatform().probe()
        found["verdict"] = verdict.reason
        if not verdict.available or torch.cuda.is_initialized():
            raise FailedError(f"{verdict}; initialised: {torch.cuda.is_initialized()}")
    with house.start() as llm:
        figures = on_worker(llm, _memory)
        found |= figures
    if not house.dry:
        asked = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used,driver_version",
                 "--format=csv,noheader,nounits"]  # fmt: skip
        name, total, *_ = subprocess.check_output(asked, text=True).splitlines()[0].split(", ")
        found["driver"] = {"name": name, "total_mib": int(total)}
        if abs(int(total) - figures["total"] / 2**20) > 0.05 * int(total):
            raise FailedError(f"{figures['total']} bytes in all, the driver says {total} MiB")
    if not 0 < figures["held"] <= figures["total"]:
        raise FailedError(str(figures))
    return found


def _memory(worker) -> dict:
    snapshot = worker.device.snapshot()
    return {"total": snapshot.total, "held": snapshot.total - snapshot.free,
            "reserved": snapshot.reserved, "budget": worker.budget}  # fmt: skip


def greedy(house: House) -> dict:
    """Token ids of the GPU in float32 beside those of the processor."""
    with house.start("cpu") as llm:
        expected = house.ids(llm)
    with house.start() as llm:
        found = house.ids(llm)
        chosen = on_worker(llm, _choices)
    equal = sum(a == b for a, b in zip(found, expected, strict=True))
    told = {"equal": equal, "of": len(expected), "operations": chosen}
    if equal < len(expected):
        raise FailedError(json.dumps(told | {"found": found, "expected": expected}))
    if not house.dry and not chosen["attention"].startswith("hardpoint_runtime.kernels"):
        raise FailedError(f"the kernels are not in use: {chosen}")
    return told


def _choices(worker) -> dict:
    choices = worker.model_runner.operations.choices
    return {each.name: "; ".join((each.reference, *each.passed_over)) for each in choices}


def graphs(house: House) -> dict:
    """Captured and replayed steps give the ids of eager ones, in every mode."""
    with house.start() as llm:
        expected = house.ids(llm)
    told = {}
    for mode in ("full", "piecewise", "full_decode_only"):
        with house.start(graph_mode=mode, graph_sizes=(1, 2, 4)) as llm:
            same(house.ids(llm), expected, mode)
            same(house.ids(llm), expected, f"{mode}, again")
            told[mode] = on_worker(llm, _graph_counts)
            so_far(told)
        if not any(count for name, count in told[mode].items() if name != "NONE"):
            raise FailedError(f"{mode}: no step replayed a graph: {told[mode]}")
        gc.collect()
    return told


def _graph_counts(worker) -> dict:
    return {mode.name: count for mode, count in worker.model_runner.graphs.counts.steps.items()}


def sleep(house: House) -> dict:
    """Bytes that sleep gives back, and addresses afterwards; graphs replay as before."""
    told = {}
    with house.start(graph_mode="full_decode_only", graph_sizes=(1, 2, 4)) as llm:
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


def kernels(house: House) -> dict:
    """Each Triton kernel beside its torch operation, on the device."""
    import gpu_kernels

    return gpu_kernels.compare(house.dry)


def streams(house: House) -> dict:
    """Values on their way to the host are those of when they were asked for, not later ones."""
    import torch

    if house.dry:
        raise SkippedError("host memory has no streams")
    from hardpoint_cuda.device import CudaDeviceOps

    device = CudaDeviceOps("cuda", 0)
    device.set_device()
    values = device.to_device([0] * (1 << 20), torch.int64)
    fetches = []
    for turn in range(200):
        values.fill_(turn)
        fetches.append(device.fetch(values[:4096] + 0))
    for turn, fetch in enumerate(fetches):
        same(set(fetch.wait().tolist()), {turn}, f"turn {turn}")
    target = torch.zeros(1 << 16, dtype=torch.int64, device=device.device)
    for turn in range(200):
        device.write(target, torch.full((1 << 16,), turn))
    same(int(target.min()), 199, "the last write")
    return {"fetches": len(fetches)}


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
                so_far(told)
        gc.collect()
    return {"tokens_per_second": told}


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
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), **source)
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
    probe, greedy, graphs, sleep, kernels, streams, nursery, speed, bandwidth, transformers,
)}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--model")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    with tempfile.TemporaryDirectory() as scratch:
        try:
            house = House(options.model, dry=options.dry_run, scratch=Path(scratch))
            found = {"outcome": "ok", **STEPS[options.step](house)}
            if options.model is None and house.model is not None and not options.dry_run:
                found["model"] = "random, of the default model's shape: no default model is here"
        except SkippedError as reason:
            found = {"outcome": "skipped", "reason": str(reason)}
        except FailedError as reason:
            found = {"outcome": "failed", "reason": str(reason)[:3000]}
        except Exception as error:  # noqa: BLE001 - the line says what it was
            traceback.print_exc()
            found = {"outcome": "error", "reason": f"{type(error).__name__}: {error}"[:3000]}
    print(json.dumps(found), flush=True)
    return int(found["outcome"] not in ("ok", "skipped"))


if __name__ == "__main__":
    sys.exit(main())
