"""The programs of a model: its stages, and the shapes that each is compiled for.

Stages: embed and layers (the backbone), select, logits; greedy and draw, preceded by edit and
penalise where asked for; gather and scores for log-probabilities, preceded by processed where they
are of what tokens are chosen from; zero and copy for the cache.
A row bucket or a tile shape is the key of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attrs import frozen
from hardpoint.errors import CancelledStepError
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hardpoint_tpu import draws, sampling_steps
from hardpoint_tpu.attention import attention
from hardpoint_tpu.buckets import Buckets, Shape
from hardpoint_tpu.kv_cache import SPEC, KVCache
from hardpoint_tpu.model import (
    AXIS,
    Attention,
    embed_step,
    layers_step,
    logits_step,
    select_step,
)
from hardpoint_tpu.pallas_attention import pallas_attention
from hardpoint_tpu.params import LlamaParams, layer_recipes, outer_recipes
from hardpoint_tpu.shape import ModelShape
from hardpoint_tpu.stages import StageSet

WHOLE = PartitionSpec()
CACHE_BATCH = 16
"""Blocks that one call zeroes or copies."""


@frozen(kw_only=True)
class ProgramShape:
    """What, beside the model, decides the programs. ``table_width`` are the columns of a block
    table, ``group`` the layers of one program, ``logprobs`` how many are found on the device.
    """

    buckets: Buckets
    table_width: int
    group: int
    logprobs: int
    dtype: Any
    attention: str = "xla"
    interpret: bool = False
    logprobs_mode: str = "raw_logprobs"

    @property
    def normalised(self) -> bool:
        """Whether log-probabilities are asked for, not logits."""
        return self.logprobs_mode.endswith("logprobs")

    @property
    def processed(self) -> bool:
        """Whether they are of the logits that tokens are chosen from."""
        return self.logprobs_mode.startswith("processed")


class Programs:
    """Compiles the stages of one model over one mesh, and gives them."""

    def __init__(self, model: ModelShape, mesh: Mesh, plan: ProgramShape) -> None:
        self.model = model
        self.mesh = mesh
        self.plan = plan
        self.stages = StageSet()
        self._add_model_stages()
        self._add_sampling_stages()
        self._add_cache_stages()

    @property
    def groups(self) -> list[tuple[int, int]]:
        """The layers program by program: (first layer, how many)."""
        layers, size = self.model.layers, min(self.plan.group, self.model.layers)
        return [(start, min(size, layers - start)) for start in range(0, layers, size)]

    def compile_all(
        self, params: LlamaParams, cache: KVCache, cancelled: Callable[[], bool]
    ) -> None:
        """Compile every stage for every shape that a step can have, largest first.

        Raises CancelledStepError between two programs once ``cancelled``.
        """
        for name, key, arguments in self._wanted(params, cache):
            if cancelled():
                raise CancelledStepError("compiling was ended before it was complete")
            self.stages[name].compile(key, arguments)

    # The stages.

    def _add_model_stages(self) -> None:
        model, outer = self.model, outer_recipes(self.model)
        layer = {name: each.spec for name, each in layer_recipes(model, 0).items()}
        table, norm = outer["embedding"].spec, outer["norm"].spec
        cache = (SPEC, SPEC)
        add = self.stages.add
        add("embed", self._over_devices(
            partial(embed_step, model), (table, WHOLE, WHOLE, WHOLE), (WHOLE, WHOLE, WHOLE)
        ))  # fmt: skip
        for _, count in self.groups:
            add(f"layers{count}", self._over_devices(
                partial(layers_step, model, self._attention()),
                ([layer] * count, [cache] * count, *(WHOLE,) * 6),
                (WHOLE, [cache] * count),
            ), donated=(1,))  # fmt: skip
        add("select", self._over_devices(
            partial(select_step, model), (norm, WHOLE, WHOLE), WHOLE
        ))  # fmt: skip
        add("logits", self._over_devices(
            partial(logits_step, model), (table, WHOLE), WHOLE
        ))  # fmt: skip

    def _add_sampling_stages(self) -> None:
        steps = draws.steps(self.model.vocabulary)
        self.steps = jax.device_put(steps, NamedSharding(self.mesh, WHOLE))
        add = self.stages.add
        add("edit", self._whole(sampling_steps.edit))
        add("penalise", self._whole(sampling_steps.penalise))
        add("greedy", self._whole(sampling_steps.greedy))
        add("draw", self._whole(sampling_steps.draw))
        plan, steps_of = self.plan, sampling_steps
        if plan.processed:
            add("processed", self._whole(steps_of.processed))
        add("gather", self._whole(
            partial(steps_of.gather, count=plan.logprobs, normalised=plan.normalised)
        ))  # fmt: skip
        add("scores", self._whole(partial(steps_of.scores, normalised=plan.normalised)))

    def _add_cache_stages(self) -> None:
        cache = (SPEC, SPEC)
        for _, count in self.groups:
            specs = [cache] * count
            self.stages.add(f"zero{count}", self._over_devices(
                _zero_blocks, (specs, WHOLE), specs
            ), donated=(0,))  # fmt: skip
            self.stages.add(f"copy{count}", self._over_devices(
                _copy_blocks, (specs, WHOLE, WHOLE), specs
            ), donated=(0,))  # fmt: skip

    def _attention(self) -> Attention:
        if self.plan.attention == "pallas":
            return partial(pallas_attention, interpret=self.plan.interpret)
        return attention

    def _over_devices(
        self, function: Callable[..., Any], inputs: Any, outputs: Any
    ) -> Callable[..., Any]:
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False
        )

    def _whole(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Every device computes the same."""

        def run(*arguments: Any) -> Any:
            specs = (WHOLE,) * len(arguments)
            return self._over_devices(function, specs, WHOLE)(*arguments)

        return run

    # Their shapes.

    def _wanted(self, params: LlamaParams, cache: KVCache) -> Iterator[tuple[str, Any, Any]]:
        """Yield (stage, key, arguments) of every program."""
        for shape in self.plan.buckets.shapes:
            yield from self._wanted_backbone(params, cache, shape)
        for rows in reversed(self.plan.buckets.rows):
            yield from self._wanted_sampling(params, rows)
        blocks = self._ints(CACHE_BATCH)
        for count in {count for _, count in self.groups}:
            caches = [cache.abstract] * count
            yield f"zero{count}", CACHE_BATCH, (caches, blocks)
            yield f"copy{count}", CACHE_BATCH, (caches, blocks, blocks)

    def _wanted_backbone(
        self, params: LlamaParams, cache: KVCache, shape: Shape
    ) -> Iterator[tuple[str, Any, Any]]:
        model = self.model
        tokens, tiles = self._ints(shape.tokens), self._ints(shape.tiles)
        x = self._array((shape.tokens, model.hidden), self.plan.dtype)
        turned = self._array((shape.tokens, 1, model.head), jnp.float32)
        tables = self._ints(shape.tiles, self.plan.table_width)
        yield "embed", shape, (_abstract(params.outer["embedding"]), tokens, tiles, tiles)
        for count in {count for _, count in self.groups}:
            layers = [_abstract(params.layers[0])] * count
            caches = [cache.abstract] * count
            batch = (tables, tiles, tiles)
            yield f"layers{count}", shape, (layers, caches, x, turned, turned, *batch)
        rows = self._ints(self.plan.buckets.sampled_rows(shape))
        yield "select", shape, (_abstract(params.outer["norm"]), x, rows)

    def _wanted_sampling(self, params: LlamaParams, rows: int) -> Iterator[tuple[str, Any, Any]]:
        vocabulary = self.model.vocabulary
        hidden = self._array((rows, self.model.hidden), self.plan.dtype)
        logits = self._array((rows, vocabulary), jnp.float32)
        flags = self._array((rows, vocabulary), jnp.bool_)
        counts, ids = self._ints(rows, vocabulary), self._ints(rows)
        three = self._array((3, rows), jnp.float32)
        keys = self._array((2, rows), jnp.uint32)
        yield "logits", rows, (_abstract(params.head), hidden)
        yield "greedy", rows, (logits,)
        yield "edit", rows, (logits, flags, logits)
        yield "penalise", rows, (logits, counts, flags, three)
        yield "draw", rows, (logits, three, ids, keys, _abstract(self.steps))
        yield "gather", rows, (logits, ids)
        yield "scores", rows, (logits,)
        if self.plan.processed:
            yield "processed", rows, (logits, three, ids)

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._array(shape, jnp.int32)

    def _array(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, WHOLE))


def _abstract(tree: Any) -> Any:
    """Return arrays as shapes with their sharding."""
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), tree
    )


def _zero_blocks(caches: Any, blocks: jax.Array) -> Any:
    return jax.tree.map(lambda cache: cache.at[blocks].set(0), caches)


def _copy_blocks(caches: Any, sources: jax.Array, targets: jax.Array) -> Any:
    return jax.tree.map(lambda cache: cache.at[targets].set(cache[sources]), caches)


def make_mesh(devices: list[jax.Device]) -> Mesh:
    """Return the mesh of the devices that share each layer."""
    return Mesh(np.asarray(devices), (AXIS,))
