"""The model's parameters on the devices: which rows of which checkpoint tensor make up each array.

A *recipe* says it for one array: its tensors, the axis along which devices share it, and for each
device the indices along that axis. Index -1 is a row of zeros. Loading goes by the recipes, and so
does giving the tensors back, whole and under their own names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from attrs import frozen
from hardpoint.checkpoints.tables import shown, some
from hardpoint.checkpoints.weight_source import WeightSource
from hardpoint.errors import CancelledStepError, CheckpointError
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from hardpoint_tpu.heads import PADDING, padded_rows
from hardpoint_tpu.model import AXIS
from hardpoint_tpu.packed import Floats
from hardpoint_tpu.shape import ModelShape
from hardpoint_tpu.weights import as_floats

Indices = NDArray[np.int64]


@frozen(kw_only=True, eq=False)
class Recipe:
    """One array of the model. ``parts[i][d]`` are the indices of tensor ``names[i]`` along ``axis``
    on device d; within a device the tensors follow each other. ``axis`` None: every device has the
    whole of the one tensor.
    """

    names: tuple[str, ...]
    axis: int | None = None
    parts: tuple[tuple[Indices, ...], ...] = ()

    @property
    def spec(self) -> PartitionSpec:
        """How the array is shared out."""
        if self.axis is None:
            return PartitionSpec()
        return PartitionSpec(*(None,) * self.axis, AXIS)

    def assemble(self, tensors: Sequence[Floats]) -> Floats:
        """Return the array of all devices, one after the other along ``axis``."""
        if self.axis is None:
            return tensors[0]
        pieces = [
            _taken(tensor, part[device], self.axis)
            for device in range(len(self.parts[0]))
            for tensor, part in zip(tensors, self.parts, strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, self.axis)

    def take_apart(self, array: Floats) -> Iterator[tuple[str, Floats]]:
        """Yield each tensor's name and itself, out of the array that :meth:`assemble` returned."""
        if self.axis is None:
            yield self.names[0], array
            return
        along = np.moveaxis(array, self.axis, 0)
        for index, name in enumerate(self.names):
            count = max(int(part.max(initial=PADDING)) for part in self.parts[index]) + 1
            tensor = np.zeros((count, *along.shape[1:]), along.dtype)
            for device, place in enumerate(self._places(index)):
                held = self.parts[index][device]
                real = held != PADDING
                tensor[held[real]] = along[place : place + len(held)][real]
            yield name, np.ascontiguousarray(np.moveaxis(tensor, 0, self.axis))

    def _places(self, index: int) -> Iterator[int]:
        """Yield where tensor ``index`` begins on each device."""
        place = 0
        for device in range(len(self.parts[0])):
            for other, part in enumerate(self.parts):
                if other == index:
                    yield place
                place += len(part[device])


def _taken(tensor: Floats, indices: Indices, axis: int) -> Floats:
    if len(indices) == tensor.shape[axis] and np.array_equal(indices, np.arange(len(indices))):
        return tensor
    taken = np.take(tensor, np.maximum(indices, 0), axis)
    np.moveaxis(taken, axis, 0)[indices == PADDING] = 0
    return taken


def layer_recipes(shape: ModelShape, index: int) -> dict[str, Recipe]:
    """Return the arrays of layer ``index``, by the names that :mod:`hardpoint_tpu.model` uses."""
    prefix = f"model.layers.{index}."
    queries = _head_rows(shape.layout.queries, shape.head)
    keys = _head_rows(shape.layout.kv, shape.head)
    inner = _rows(padded_rows(shape.inner, shape.devices))

    def named(*parts: str, kind: str = "weight") -> tuple[str, ...]:
        return tuple(f"{prefix}{part}.{kind}" for part in parts)

    attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    mlp = ("mlp.gate_proj", "mlp.up_proj")
    recipes = {
        "input_norm": Recipe(names=named("input_layernorm")),
        "qkv": Recipe(names=named(*attention), axis=0, parts=(queries, keys, keys)),
        "out": Recipe(names=named("self_attn.o_proj"), axis=1, parts=(queries,)),
        "post_norm": Recipe(names=named("post_attention_layernorm")),
        "gate_up": Recipe(names=named(*mlp), axis=0, parts=(inner, inner)),
        "down": Recipe(names=named("mlp.down_proj"), axis=1, parts=(inner,)),
    }
    if shape.attention_bias:
        recipes["qkv_bias"] = Recipe(
            names=named(*attention, kind="bias"), axis=0, parts=(queries, keys, keys)
        )
        recipes["out_bias"] = Recipe(names=named("self_attn.o_proj", kind="bias"))
    if shape.mlp_bias:
        recipes["gate_up_bias"] = Recipe(
            names=named(*mlp, kind="bias"), axis=0, parts=(inner, inner)
        )
        recipes["down_bias"] = Recipe(names=named("mlp.down_proj", kind="bias"))
    return recipes


def outer_recipes(shape: ModelShape) -> dict[str, Recipe]:
    """Return the arrays outside the layers; a tied model has no ``head`` of its own."""
    rows = _rows(padded_rows(shape.vocabulary, shape.devices))
    recipes = {
        "embedding": Recipe(names=("model.embed_tokens.weight",), axis=0, parts=(rows,)),
        "norm": Recipe(names=("model.norm.weight",)),
    }
    if not shape.tied:
        recipes["head"] = Recipe(names=("lm_head.weight",), axis=0, parts=(rows,))
    return recipes


def all_recipes(shape: ModelShape) -> list[Recipe]:
    """Return the recipes of every array, the outer ones first."""
    tables = [outer_recipes(shape), *(layer_recipes(shape, i) for i in range(shape.layers))]
    return [recipe for table in tables for recipe in table.values()]


def _head_rows(layout: Sequence[Sequence[int]], size: int) -> tuple[Indices, ...]:
    """Return the rows of each device's heads."""
    rows = []
    for heads in layout:
        held = np.asarray(heads, np.int64)[:, None]
        rows.append(np.where(held == PADDING, PADDING, held * size + np.arange(size)).reshape(-1))
    return tuple(rows)


def _rows(parts: Sequence[Sequence[int]]) -> tuple[Indices, ...]:
    return tuple(np.asarray(part, np.int64) for part in parts)


@frozen(kw_only=True, eq=False)
class LlamaParams:
    """The arrays of a model, on the devices or (``put`` by numpy) on the host: ``outer`` and one
    table for each layer.
    """

    outer: Mapping[str, Any]
    layers: tuple[Mapping[str, Any], ...]

    @property
    def head(self) -> Any:
        """The output projection: the embedding's where they are tied."""
        return self.outer.get("head", self.outer["embedding"])

    def arrays(self) -> list[Any]:
        """Return every array once."""
        return [*self.outer.values(), *(each for layer in self.layers for each in layer.values())]

    def mapped(self, change: Callable[[Recipe, Any], Any], shape: ModelShape) -> LlamaParams:
        """Return the same with ``change(recipe, array)`` in place of each array."""
        outer = outer_recipes(shape)
        layers = []
        for index, arrays in enumerate(self.layers):
            recipes = layer_recipes(shape, index)
            layers.append({name: change(recipes[name], arrays[name]) for name in recipes})
        return LlamaParams(
            outer={name: change(outer[name], self.outer[name]) for name in outer},
            layers=tuple(layers),
        )


def load_params(
    source: WeightSource,
    shape: ModelShape,
    mesh: Mesh,
    dtype: Any,
    cancelled: Callable[[], bool] = lambda: False,
) -> LlamaParams:
    """Read every array to the devices of ``mesh``, one at a time.

    Raises CheckpointError for missing, extra or misshapen tensors before the first is read, and
    CancelledStepError as soon as ``cancelled``.
    """
    recipes = [outer_recipes(shape), *(layer_recipes(shape, i) for i in range(shape.layers))]
    check_tensors(source, shape, all_recipes(shape))

    def load(recipe: Recipe) -> jax.Array:
        if cancelled():
            raise CancelledStepError("loading was ended before the model was complete")
        tensors = [as_floats(source.read(name)) for name in recipe.names]
        return placed(recipe.assemble(tensors).astype(dtype, copy=False), mesh, recipe.spec)

    outer, *layers = ({name: load(each) for name, each in table.items()} for table in recipes)
    return LlamaParams(outer=outer, layers=tuple(layers))


def placed(array: NDArray[Any], mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Return a host array shared out over the devices of ``mesh``."""
    return jax.device_put(array, NamedSharding(mesh, spec))


def check_tensors(source: WeightSource, shape: ModelShape, recipes: Sequence[Recipe]) -> None:
    """Raise CheckpointError unless ``source`` holds just what the recipes need, in their shapes."""
    needed = needed_shapes(shape, recipes)
    held = source.shapes
    if missing := [name for name in needed if name not in held]:
        raise CheckpointError(f"{len(missing)} weights of the model are missing: {some(missing)}")
    extra = [name for name in held if name not in needed and not _ignorable(name, shape)]
    if extra:
        raise CheckpointError(
            f"{len(extra)} weights have no place in the model as its configuration describes it: "
            f"{some(extra)}"
        )
    for name, wanted in needed.items():
        if tuple(held[name]) != wanted:
            raise CheckpointError(
                f"weight {shown(name)} has shape {list(held[name])}, but its place in the model "
                f"has {list(wanted)}"
            )


def needed_shapes(shape: ModelShape, recipes: Sequence[Recipe]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that the recipes name."""
    queries = max(max(heads) for heads in shape.layout.queries) + 1
    keys = max(max(heads) for heads in shape.layout.kv) + 1
    rows = {
        "q_proj": (queries * shape.head, shape.hidden),
        "k_proj": (keys * shape.head, shape.hidden),
        "v_proj": (keys * shape.head, shape.hidden),
        "o_proj": (shape.hidden, queries * shape.head),
        "gate_proj": (shape.inner, shape.hidden),
        "up_proj": (shape.inner, shape.hidden),
        "down_proj": (shape.hidden, shape.inner),
        "embed_tokens": (shape.vocabulary, shape.hidden),
        "lm_head": (shape.vocabulary, shape.hidden),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name in (name for recipe in recipes for name in recipe.names):
        *_, part, kind = name.split(".")
        if part in rows:
            shapes[name] = rows[part] if kind == "weight" else rows[part][:1]
        else:
            shapes[name] = (shape.hidden,)
    return shapes


def _ignorable(name: str, shape: ModelShape) -> bool:
    return name.endswith(".rotary_emb.inv_freq") or (shape.tied and name == "lm_head.weight")


def whole_tensors(params: LlamaParams, shape: ModelShape) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield every tensor of the model, whole, under its checkpoint name, one array at a time."""
    tables = [
        (outer_recipes(shape), params.outer),
        *((layer_recipes(shape, i), arrays) for i, arrays in enumerate(params.layers)),
    ]
    for recipes, arrays in tables:
        for name, recipe in recipes.items():
            yield from recipe.take_apart(np.asarray(arrays[name]))
