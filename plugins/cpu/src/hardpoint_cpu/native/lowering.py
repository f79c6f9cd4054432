"""From a decoder of torch modules to the operations of a native program.

The residual stream is one buffer, to which attention and MLP add. Of the last layer only the rows
to sample are computed behind its attention. A shard of a model pauses where sums of all shards are
wanted; a pipeline stage begins and ends with the stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from hardpoint_runtime.models.experts import Experts
from hardpoint_runtime.quantization import form_of

from hardpoint_cpu.native import lowered as kinds
from hardpoint_cpu.native.library import Matrix, Op, type_of
from hardpoint_cpu.native.lowered import KINDS, LOGITS, NAMES, Clear, Lowered, Outside, Pause, Sum

if TYPE_CHECKING:
    from hardpoint_runtime.memory.kv_cache import LayerCache
    from hardpoint_runtime.model_runner import TorchModelRunner
    from hardpoint_runtime.models.decoder import DecoderForCausalLM

    from hardpoint_cpu.model_runner import CpuModelRunner
    from hardpoint_cpu.platform import CpuPlatform

(
    STREAM, NORMED, QKV, ATTENDED, INNER, PICKED, PICKED_ATTENDED,
    PARTIAL, GATE_UP, ROUTER, CHOSEN, SHARED_GATE,
) = range(12)  # fmt: skip
"""The buffers: the residual stream, its rows to sample (and what they attended to), and results
between two operations. Those that a model does not need have no columns.
"""

TORCH_CHOOSES = 12
"""Numbers of 32 bits for each logit of a step: its draws take integers of 64 bits."""
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
"""What stands before ``_and_mul`` in the names of activations, as the library numbers them."""


def lower(runner: TorchModelRunner) -> Lowered:
    """Return the operations of the runner's model over its weights and KV cache, where they are.
    Called after warming up, for a model that :func:`hardpoint_cpu.native.refusals.refusal` lets
    pass.
    """
    return _Lowering(runner).all()


def buffer_columns(model: DecoderForCausalLM) -> tuple[int, ...]:
    """Return the columns of each buffer, in the order of their numbers."""
    description, config = model.description, model.config
    hidden, seat = description.hidden_size, model.seat
    heads = seat.heads(description)
    query, caches = heads.query.size, 2 * heads.kv.size
    head, experts = description.head_size, config.experts
    inner = seat.share(description.intermediate_size).size
    router = chosen = gate = 0
    if experts is not None:
        router, chosen = experts.count, 2 * experts.per_token
        if experts.shared is not None:
            gate, inner = 1, max(inner, seat.share(experts.shared).size)
    partial = hidden if config.norms_around or gate or seat.tensor is not None else 0
    apart = any(
        name.endswith("gate_up") and len(form.parts) > 1
        for name, module in model.named_modules()
        if (form := form_of(module, "weight")) is not None
    )
    return (
        hidden, hidden, (query + caches) * head, query * head, inner, hidden, query * head,
        partial, 2 * inner * apart, router, chosen, gate,
    )  # fmt: skip


def program_bytes(runner: CpuModelRunner) -> int:
    """Return what a program takes beside weights and KV cache: buffers, rows as products want
    them, logits, angles; what the tokens of a mixture of experts take while they are with them; and
    what torch takes for a step that the program does not do: as much for its activations, and for
    choosing tokens.
    """
    model: Any = runner.get_model()
    tokens, rows = runner.most
    buffers, experts = buffer_columns(model), model.config.experts
    columns, prepared = sum(buffers), max(buffers)
    if experts is not None:
        prepared *= experts.per_token
        columns += experts.per_token * (2 * model.description.hidden_size + 3 * experts.size)
    angles = len(model.rotaries) * runner.max_model_len * model.description.head_size
    choosing = TORCH_CHOOSES * rows * model.description.vocab_size
    return 4 * ((2 * columns + prepared) * tokens + choosing + angles)


class _Lowering:
    def __init__(self, runner: TorchModelRunner) -> None:
        self.model: Any = runner.get_model()
        self.config = self.model.config
        self.caches = runner.kv_cache.layers if runner.kv_cache else {}
        self.positions = runner.max_model_len
        self.activations = cast("CpuPlatform", runner.platform).options.activations
        self.ops: list[Op] = []
        self.ends: list[int] = []
        self.pauses: dict[int, tuple[Pause, ...]] = {}
        self.held: list[torch.Tensor] = []
        self.angles = [self._angles(rotary) for rotary in self.model.rotaries]
        self.activation = ACTIVATIONS[self.config.activation]

    def all(self) -> Lowered:
        """Lower the whole model, or a pipeline stage of it."""
        model = self.model
        if model.embed is not None:
            (op,) = self._multiply(kinds.EMBED, model.embed, out=STREAM)
            op.scale = model.embedding_scale
            if (group := group_of(model.embed)) is not None:
                self._pause(Outside(buffer=STREAM), Sum(group=group, buffer=STREAM, picked=False))
        layers = list(model.layers)
        for layer in layers:
            self._layer(layer, last=model.norm is not None and layer is layers[-1])
        if model.norm is not None:
            if not layers:
                self._add(kinds.GATHER, source=STREAM, out=PICKED, picked=True)
            self._norm(model.norm, source=PICKED, picked=True)
            for op in self._multiply(kinds.LINEAR, model.head, NORMED, LOGITS, picked=True):
                op.cap = self.config.logit_cap or 0.0
            self.ends.append(len(self.ops))
        table = model.head or model.embed
        group = None if model.head is None else group_of(model.head)
        return Lowered(
            ops=tuple(self.ops),
            ends=tuple(self.ends),
            pauses=self.pauses,
            columns=buffer_columns(model),
            positions=self.positions,
            heads=model.seat.heads(model.description).query.size,
            vocabulary=model.description.vocab_size if table is None else table.rows.size,
            first_token=0 if model.embed is None else model.embed.rows.start,
            embeds_all=model.embed is not None and group_of(model.embed) is None,
            gathers=None if group is None else (group, model.head.sizes),
            held=tuple(self.held),
        )

    def _layer(self, layer: Any, *, last: bool) -> None:
        attention, cache = layer.attention, self.caches[layer.attention.name]
        options = attention.options
        self._norm(layer.input_norm, source=STREAM)
        self._multiply(kinds.LINEAR, attention.qkv, NORMED, QKV)
        self._rotate(attention, cache, *self.angles[layer.rotary])
        op = self._add(kinds.ATTEND, source=QKV, out=ATTENDED, cache=cache)
        op.scale = options["scale"]
        op.window, op.cap = options.get("window") or 0, options.get("softcap") or 0.0
        stream, attended = STREAM, ATTENDED
        if last:  # of what follows only the rows to sample are wanted
            self._add(kinds.GATHER, source=STREAM, out=PICKED, picked=True)
            self._add(kinds.GATHER, source=ATTENDED, out=PICKED_ATTENDED, picked=True)
            stream, attended = PICKED, PICKED_ATTENDED
        self._back(attended, attention.out, layer.attention_norm, stream, picked=last)
        self._norm(layer.inner_norm, source=stream, picked=last)
        if isinstance(layer.mlp, Experts):
            self._experts(layer.mlp, stream, picked=last)
        else:
            self._gated(layer.mlp, picked=last)
            self._back(INNER, layer.mlp.down, layer.mlp_norm, stream, picked=last)
        self.ends.append(len(self.ops))

    def _back(self, source: int, projection: Any, norm: Any, stream: int, *, picked: bool) -> None:
        """Bring a result back to the stream, through its norm and the other shards."""
        group = group_of(projection)
        if group is None and norm is None:
            self._multiply(kinds.ADD, projection, source, stream, picked=picked)
            return
        for op in self._multiply(kinds.LINEAR, projection, source, PARTIAL, picked=picked):
            op.bias = op.bias if group is None else None
        if group is not None:
            target, bias = stream if norm is None else None, projection.bias
            self._pause(Sum(group=group, buffer=PARTIAL, picked=picked, bias=bias, target=target))
        if norm is not None:
            self._norm(norm, source=PARTIAL, out=stream, picked=picked)

    def _gated(self, mlp: Any, *, picked: bool) -> None:
        parts = len(self._parts(mlp.gate_up))
        kind, out = (kinds.GATED, INNER) if parts == 1 else (kinds.LINEAR, GATE_UP)
        ops = self._multiply(kind, mlp.gate_up, NORMED, out, picked=picked)
        if parts > 1:  # packed unlike
            ops = [self._add(kinds.ACTIVATE, source=GATE_UP, out=INNER, picked=picked)]
            ops[0].columns = sum(part.size for part in mlp.gate_up.parts.values()) // 2
        ops[0].activation = self.activation

    def _experts(self, mlp: Experts, stream: int, *, picked: bool) -> None:
        config, group = mlp.config, group_of(mlp)
        self._multiply(kinds.LINEAR, mlp.router, NORMED, ROUTER, picked=picked)
        op = self._add(kinds.ROUTE, source=ROUTER, out=CHOSEN, picked=picked)
        op.columns, op.per_token, op.normalised = config.count, config.per_token, config.normalised
        if group is not None:
            self._pause(Clear(buffer=PARTIAL, picked=picked))
        op = self._add(
            kinds.EXPERTS, source=NORMED, out=stream if group is None else PARTIAL, picked=picked
        )
        ((_, op.weight),), ((_, op.other),) = self._parts(mlp, "gate_up"), self._parts(mlp, "down")
        op.second, op.columns = CHOSEN, config.count
        op.per_token, op.activation = config.per_token, self.activation
        if group is not None:
            self._pause(Sum(group=group, buffer=PARTIAL, picked=picked, target=stream))
        if mlp.shared is None:
            return
        self._multiply(kinds.LINEAR, mlp.shared_router, NORMED, SHARED_GATE, picked=picked)
        self._gated(mlp.shared, picked=picked)
        self._multiply(kinds.LINEAR, mlp.shared.down, INNER, PARTIAL, picked=picked)
        if (group := group_of(mlp.shared.down)) is not None:
            self._pause(Sum(group=group, buffer=PARTIAL, picked=picked))
        op = self._add(kinds.SIGMOID_ADD, source=PARTIAL, out=stream, picked=picked)
        op.second, op.columns = SHARED_GATE, mlp.hidden

    def _rotate(
        self, attention: Any, cache: LayerCache, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        op = self._add(kinds.ROTATE, source=QKV, out=QKV, cache=cache)
        op.cos, op.sin = self._at(cos), self._at(sin)
        op.turned = 2 * cos.shape[-1]
        if attention.query_norm is not None:
            query, key = attention.query_norm.weight, attention.key_norm.weight
            op.query_norm, op.key_norm = self._at(query), self._at(key)
            op.vector_type, op.eps = KINDS[query.dtype], attention.query_norm.eps

    def _norm(
        self, norm: Any, *, source: int, out: int | None = None, picked: bool = False
    ) -> None:
        """Norm into NORMED, or onto what another buffer has."""
        kind = kinds.NORM if out is None else kinds.ADD_NORM
        op = self._add(kind, source=source, out=NORMED if out is None else out, picked=picked)
        weight = norm.weight
        op.weight = Matrix(self._at(weight), 1, len(weight), KINDS[weight.dtype])
        op.eps = norm.eps

    def _multiply(
        self, kind: int, module: Any, source: int = STREAM, out: int = STREAM, *,
        picked: bool = False,
    ) -> list[Op]:  # fmt: skip
        """Add an operation over a module's weight for each part of it that is packed alike."""
        ops, bias = [], getattr(module, "bias", None)
        for first, matrix in self._parts(module):
            op = self._add(kind, source=source, out=out, picked=picked)
            op.weight, op.out_column = matrix, first
            if bias is not None:
                op.bias = self._at(bias) + first * bias.element_size()
                op.vector_type = KINDS[bias.dtype]
            ops.append(op)
        return ops

    def _parts(self, module: Any, parameter: str = "weight") -> list[tuple[int, Matrix]]:
        """Return the parts of a matrix that are held alike, each behind its first row."""
        tensor, form = module.get_parameter(parameter), form_of(module, parameter)
        place = self._at(tensor)
        if form is None:
            kind = type_of(NAMES[tensor.dtype], self.activations)
            return [(0, Matrix(place, *tensor.shape, kind))]
        return [
            (
                part.first,
                Matrix(
                    place + part.offset, part.rows, form.cols, type_of(part.kind, self.activations)
                ),
            )
            for part in form.parts
        ]

    def _add(
        self,
        kind: int,
        *,
        out: int,
        source: int = STREAM,
        cache: LayerCache | None = None,
        picked: bool = False,
    ) -> Op:
        op = Op(kind=kind, source=source, out=out, picked=picked, scale=1.0)
        if cache is not None:
            op.keys, op.values = self._at(cache.key), self._at(cache.value)
        self.ops.append(op)
        return op

    def _pause(self, *pauses: Pause) -> None:
        place = len(self.ops)
        self.pauses[place] = (*self.pauses.get(place, ()), *pauses)

    def _angles(self, rotary: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the angles of every position: cos and sin, each [positions, turned / 2]."""
        cos, sin = rotary(torch.arange(self.positions))
        half = cos.shape[-1] // 2
        return cos[:, 0, :half].contiguous(), sin[:, 0, half:].contiguous()

    def _at(self, tensor: torch.Tensor) -> int:
        self.held.append(tensor)
        return tensor.data_ptr()


def group_of(module: Any) -> Any:
    """Return the shards among which a module's sum is shared out, None where it is whole."""
    return module._group  # noqa: SLF001 - the runtime's own modules
