"""From a decoder of torch modules to the operations of a native program."""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING, Any, cast

import torch
from attrs import field, frozen

from hardpoint_cpu.native.library import Matrix, Op

if TYPE_CHECKING:
    from hardpoint.checkpoints.description import ModelDescription
    from hardpoint_runtime.memory.kv_cache import LayerCache
    from hardpoint_runtime.model_runner import TorchModelRunner
    from hardpoint_runtime.models.decoder import DecoderForCausalLM

    from hardpoint_cpu.model_runner import CpuModelRunner

EMBED, NORM, LINEAR, ADD, GATED, ROTATE, ATTEND, GATHER = range(8)
"""The kinds of operations, as the library numbers them."""

STREAM, NORMED, QKV, ATTENDED, INNER, PICKED, PICKED_ATTENDED = range(7)
LOGITS = -1
"""The buffers. ``STREAM`` is the residual stream, the picked ones are of the rows to sample."""

TYPES = {torch.float32: 0, torch.bfloat16: 1}


@frozen(kw_only=True, eq=False)
class Lowered:
    """A model's operations. ``ends`` are the places after each layer's last one, where a step may
    be ended; ``columns`` those of each buffer; ``held`` what the pointers point at.
    """

    ops: tuple[Op, ...]
    ends: tuple[int, ...]
    columns: tuple[int, ...]
    positions: int
    held: tuple[torch.Tensor, ...] = field(repr=False)


def lower(runner: TorchModelRunner) -> Lowered:
    """Return the operations of the runner's model over its weights and KV cache, where they are.
    Called after warming up, for a model without :func:`refusal`.
    """
    return _Lowering(runner).all()


class _Lowering:
    def __init__(self, runner: TorchModelRunner) -> None:
        self.model = model = cast("DecoderForCausalLM", runner.get_model())
        self.caches = runner.kv_cache.layers if runner.kv_cache else {}
        self.positions = runner.max_model_len
        self.ops: list[Op] = []
        self.ends: list[int] = []
        self.held: list[torch.Tensor] = []
        self.angles = [self._angles(rotary) for rotary in model.rotaries]

    def all(self) -> Lowered:
        """Lower the whole model."""
        model = self.model
        embed, head = model.embed, model.head
        self._add(EMBED, out=STREAM, weight=embed, scale=model.embedding_scale)
        layers = list(model.layers)
        for layer in layers:
            self._layer(layer, last=layer is layers[-1])
        self._add(NORM, source=PICKED, out=NORMED, weight=model.norm, picked=True)
        self._add(LINEAR, source=NORMED, out=LOGITS, weight=head, picked=True)
        self.ends.append(len(self.ops))
        return Lowered(
            ops=tuple(self.ops),
            ends=tuple(self.ends),
            columns=buffer_columns(model.description),
            positions=self.positions,
            held=tuple(self.held),
        )

    def _layer(self, layer: Any, *, last: bool) -> None:
        attention, mlp, cache = layer.attention, layer.mlp, self.caches[layer.attention.name]
        window = attention.options.get("window") or 0
        self._add(NORM, source=STREAM, out=NORMED, weight=layer.input_norm)
        self._add(LINEAR, source=NORMED, out=QKV, weight=attention.qkv)
        self._rotate(attention, cache, *self.angles[layer.rotary])
        self._add(
            ATTEND, source=QKV, out=ATTENDED, cache=cache, window=window,
            scale=attention.options["scale"],
        )  # fmt: skip
        stream, attended = STREAM, ATTENDED
        if last:  # of what follows only the rows to sample are wanted
            self._add(GATHER, source=STREAM, out=PICKED, picked=True)
            self._add(GATHER, source=ATTENDED, out=PICKED_ATTENDED, picked=True)
            stream, attended = PICKED, PICKED_ATTENDED
        self._add(ADD, source=attended, out=stream, weight=attention.out, picked=last)
        self._add(NORM, source=stream, out=NORMED, weight=layer.inner_norm, picked=last)
        self._add(GATED, source=NORMED, out=INNER, weight=mlp.gate_up, picked=last)
        self._add(ADD, source=INNER, out=stream, weight=mlp.down, picked=last)
        self.ends.append(len(self.ops))

    def _rotate(
        self, attention: Any, cache: LayerCache, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        op = self._add(ROTATE, source=QKV, out=QKV, cache=cache, window=0)
        op.cos, op.sin = self._at(cos), self._at(sin)
        if attention.query_norm is not None:
            query, key = attention.query_norm.weight, attention.key_norm.weight
            op.query_norm, op.key_norm = self._at(query), self._at(key)
            op.weight.type, op.eps = TYPES[query.dtype], attention.query_norm.eps

    def _add(
        self,
        kind: int,
        *,
        out: int,
        source: int = STREAM,
        weight: Any = None,
        cache: LayerCache | None = None,
        picked: bool = False,
        window: int = 0,
        scale: float = 1.0,
    ) -> Op:
        op = Op(kind=kind, source=source, out=out, picked=picked, window=window, scale=scale)
        if weight is not None:
            op.weight = self._matrix(weight.weight)
            op.eps = getattr(weight, "eps", 0.0)
            bias = getattr(weight, "bias", None)
            op.bias = None if bias is None else self._at(bias)
        if cache is not None:
            op.keys, op.values = self._at(cache.key), self._at(cache.value)
        self.ops.append(op)
        return op

    def _matrix(self, tensor: torch.Tensor) -> Matrix:
        rows, cols = tensor.shape if tensor.ndim == 2 else (1, len(tensor))
        return Matrix(self._at(tensor), rows, cols, TYPES[tensor.dtype])

    def _angles(self, rotary: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the angles of every position: cos and sin, each [positions, head / 2]."""
        cos, sin = rotary(torch.arange(self.positions))
        half = cos.shape[-1] // 2
        return cos[:, 0, :half].contiguous(), sin[:, 0, half:].contiguous()

    def _at(self, tensor: torch.Tensor) -> int:
        self.held.append(tensor)
        return tensor.data_ptr()


def buffer_columns(description: ModelDescription) -> tuple[int, ...]:
    """Return the columns of each buffer, in the order of their numbers."""
    hidden, head = description.hidden_size, description.head_size
    attended, caches = description.num_heads * head, 2 * description.num_kv_heads * head
    inner = description.intermediate_size
    return (hidden, hidden, attended + caches, attended, inner, hidden, attended)


def program_bytes(runner: CpuModelRunner) -> int:
    """Return what a program takes beside weights and KV cache."""
    tokens, rows = runner.most
    description = runner.description
    angles = runner.max_model_len * description.head_size
    return 4 * (sum(buffer_columns(description)) * tokens + rows * description.vocab_size + angles)


def cost_per_layer(lowered: Lowered) -> list[int]:
    """Return the bytes of weights between one of :attr:`Lowered.ends` and the next."""
    sizes = [op.weight.rows * op.weight.cols * (2 if op.weight.type else 4) for op in lowered.ops]
    starts = (0, *lowered.ends[:-1])
    return [sum(sizes[a:b]) for a, b in itertools.zip_longest(starts, lowered.ends)]


def as_array(lowered: Lowered) -> ctypes.Array[Op]:
    """Return the operations as the library takes them."""
    return (Op * len(lowered.ops))(*lowered.ops)
