"""Where the time of a step goes: `python benchmarks/xla.py --profile`.

For each kind of step, the programs that it calls, how often, and the processor time that a call
takes on all threads together: unlike a clock's, that is hardly longer on a busy machine. Beside it
a layer's four matrix products alone, by XLA and by torch. Each program runs on the model's own
weights and cache, eight layers one after the other, so that weights come from memory as in a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

CASES = {
    "decode batch 1": (1, 1, 100),
    "decode batch 16": (16, 1, 100),
    "prefill 1024": (16, 64, 0),
}
"""Tiles, tokens of a tile, position of the first: of each tile, or of the one prompt they share."""
SOME = 8
"""Layers that are timed; the others do the same."""
PRODUCTS = ("qkv", "out", "gate_up", "down")


def profile(llm: Any) -> None:
    """Print the tables."""
    (tables,) = llm.collective_rpc(_profiled)
    for case, rows in tables.items():
        total = sum(count * ms for count, ms in rows["programs"].values())
        print(f"{case}: {total:.1f} ms of processor time in programs")
        for name, (count, ms) in rows["programs"].items():
            print(f"    {name:12} {count:3} x {ms:8.3f} ms   {100 * count * ms / total:5.1f} %")
        print(
            f"    products of a layer alone: XLA {rows['xla']:.3f} ms, torch {rows['torch']:.3f} ms"
        )
        print(f"    cache of a layer: {rows['cache']}")


def _profiled(worker: Any) -> dict[str, Any]:
    runner = worker.get_model_runner()
    return {case: _case(runner, *where) for case, where in CASES.items()}


def _case(runner: Any, tiles: int, tile: int, position: int) -> dict[str, Any]:
    import jax
    import numpy as np
    from hardpoint_tpu.buckets import Shape
    from hardpoint_tpu.programs import WHOLE
    from jax.sharding import NamedSharding

    shape, stages, params = Shape(tiles, tile), runner.programs.stages, runner.get_model().params
    width = runner.requests.blocks.shape[1]
    columns = np.arange(width) + np.arange(tiles)[:, None] * (width if tile == 1 else 0)
    tables = (columns % (runner.cache.num_blocks - 1) + 1).astype(np.int32)
    starts = np.full(tiles, position) if tile == 1 else np.arange(tiles) * tile
    counts = np.full(tiles, tile, np.int32)
    where = jax.device_put(
        (tables, starts.astype(np.int32), counts), NamedSharding(runner.mesh, WHOLE)
    )
    ids, rows = np.zeros(shape.tokens, np.int32), np.zeros(runner.buckets.sampled_rows(shape), int)
    rows = rows.astype(np.int32)
    x, cos, sin = stages["embed"](shape, params.outer["embedding"], ids, *where[1:])
    hidden = stages["select"](shape, params.outer["norm"], x, rows)
    logits = stages["logits"](len(rows), params.head, hidden)
    places = _pointers(runner)

    def layers() -> Any:
        for index, layer in enumerate(params.layers[:SOME]):
            cache = runner.cache.take(index, 1)
            out, written = stages["layers1"](shape, [dict(layer)], cache, x, cos, sin, *where)
            runner.cache.put(index, written)
        return out

    calls: dict[str, Callable[[], Any]] = {
        "embed": lambda: stages["embed"](shape, params.outer["embedding"], ids, *where[1:]),
        "layers1": layers,
        "select": lambda: stages["select"](shape, params.outer["norm"], x, rows),
        "logits": lambda: stages["logits"](len(rows), params.head, hidden),
        "greedy": lambda: stages["greedy"](len(rows), logits),
    }
    spent = {name: (1, _spent(call)) for name, call in calls.items()}
    spent["layers1"] = (len(params.layers), spent["layers1"][1] / SOME)
    found: dict[str, Any] = {"programs": spent}
    found |= _products(params.layers[:SOME], shape.tokens)
    aliased = stages["layers1"].programs[shape].memory_analysis().alias_size_in_bytes
    held = sum(array.nbytes for array in runner.cache.take(0, 1)[0])
    kept = "stayed where it was" if _pointers(runner) == places else "moved"
    found["cache"] = f"{held} bytes, {aliased} of them written in place; it {kept}"
    return found


def _pointers(runner: Any) -> list[int]:
    return [array.unsafe_buffer_pointer() for array in runner.cache.take(0, 1)[0]]


def _products(layers: Any, tokens: int) -> dict[str, float]:
    """Return the milliseconds of one layer's matrix products, in the mean of ``layers``."""
    import jax
    import numpy as np
    import torch
    from hardpoint_tpu.model import linear

    rng = np.random.default_rng(0)
    given = {
        name: rng.standard_normal((tokens, layers[0][name].shape[1]), dtype=np.float32)
        for name in PRODUCTS
    }
    on_device = {name: jax.device_put(each) for name, each in given.items()}
    weights = [{name: layer[name].astype("float32") for name in PRODUCTS} for layer in layers]
    run = jax.jit(lambda x, weight: [linear(x[name], weight[name]) for name in PRODUCTS])
    tensors = [{name: torch.from_dlpack(each[name]) for name in PRODUCTS} for each in weights]
    inputs = {name: torch.from_numpy(each) for name, each in given.items()}

    def by_torch() -> None:
        with torch.inference_mode():
            for each in tensors:
                for name in PRODUCTS:
                    inputs[name] @ each[name].T

    torch.set_num_threads(1)  # idle threads of its pool would count as work
    return {
        "xla": _spent(lambda: [run(on_device, weight) for weight in weights]) / len(layers),
        "torch": _spent(by_torch) / len(layers),
    }


def _spent(call: Callable[[], Any]) -> float:
    """Return the milliseconds of processor time of a call, in the mean of several."""
    import jax

    jax.block_until_ready(call())
    begun = time.process_time()
    count = 0
    while count < 2 or time.process_time() - begun < 0.3:
        jax.block_until_ready(call())
        count += 1
    return (time.process_time() - begun) / count * 1e3
