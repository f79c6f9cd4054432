"""The tensors of a built-in decoder: their Hugging Face names and shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Final

from hardpoint.checkpoints.decoder import DecoderConfig, ExpertsConfig, LayerConfig
from hardpoint.checkpoints.decoder_architectures import ARCHITECTURES, decoder_config
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.tables import shown, some
from hardpoint.errors import CheckpointError, UnsupportedModelError

EMBEDDING: Final = "model.embed_tokens"
NORM: Final = "model.norm"
HEAD: Final = "lm_head"
LAYERS: Final = "model.layers."
MORE: Final = 64
"""Tensors beyond twice those that there are, after which the names of missing ones are enough."""

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def expected_shapes(description: ModelDescription) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a model of this description has; linear weights are (outputs,
    inputs). A tied model needs no ``lm_head.weight``.

    Raises UnsupportedModelError for an architecture that is not built in.
    """
    return dict(_tensors(description))


def _tensors(description: ModelDescription) -> Shapes:
    config = decoder_config(description)
    if config is None:
        raise UnsupportedModelError(
            f"{description.path}: the tensors of {description.architecture} are not known here"
        )
    hidden = description.hidden_size
    yield f"{EMBEDDING}.weight", (description.vocab_size, hidden)
    yield f"{NORM}.weight", (hidden,)
    if not config.tied:
        yield f"{HEAD}.weight", (description.vocab_size, hidden)
    for index, layer in enumerate(config.layers):
        for name, shape in _layer(description, config, layer):
            yield f"{LAYERS}{index}.{name}", shape


def check_tensors(description: ModelDescription, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Raise CheckpointError unless the files hold every tensor that the description implies.

    So no worker is started, and nothing is allocated, for a description that the files belie.
    ``shapes`` maps Hugging Face names to what the files hold. Returns False for an architecture, or
    a variant of one, that is not built in: a plugin may know its tensors. A configuration that
    speaks of a great many is not followed further than there are any.
    """
    path = description.path
    if description.architecture not in ARCHITECTURES:
        return False
    try:
        expected = dict(islice(_tensors(description), 2 * len(shapes) + MORE))
    except UnsupportedModelError:
        return False
    last = f"{LAYERS}{description.num_layers - 1}."
    if not any(name.startswith(last) for name in shapes):
        raise CheckpointError(
            f"{path}: the configuration says {description.num_layers} layers, but there are only "
            f"{len(shapes)} tensors: a part of the model is missing"
        )
    if missing := [name for name in expected if name not in shapes]:
        raise CheckpointError(
            f"{path}: {len(missing)} of the model's tensors are missing: {some(missing)}"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise CheckpointError(
                f"{path}: tensor {shown(name)} has shape {list(shapes[name])}, but the "
                f"configuration makes it {list(shape)}: they do not belong together"
            )
    return True


def check_size(description: ModelDescription, held: int) -> None:
    """Raise CheckpointError if files of ``held`` bytes cannot hold a model of this description:
    for those of which :func:`check_tensors` knows no more.
    """
    least = description.hidden_size * max(description.vocab_size, description.num_layers)
    if least > held * 8:  # a bit for each element of the embedding is the least there can be
        raise CheckpointError(
            f"{description.path}: the configuration ({shown(description.architecture)}, vocabulary "
            f"{description.vocab_size}, width {description.hidden_size}) needs more than the "
            f"{held} bytes that the files hold: they do not belong together"
        )


def norm_names(config: DecoderConfig) -> tuple[str, ...]:
    """Return a layer's norms: before attention, before the MLP; then, if there are any, behind
    attention, behind the MLP.
    """
    if not config.norms_around:
        return ("input_layernorm", "post_attention_layernorm")
    return (
        "input_layernorm",
        "pre_feedforward_layernorm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    )


def _layer(description: ModelDescription, config: DecoderConfig, layer: LayerConfig) -> Shapes:
    hidden, head = description.hidden_size, description.head_size
    queries, keys = description.num_heads * head, description.num_kv_heads * head
    for name in norm_names(config):
        yield f"{name}.weight", (hidden,)
    parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    if config.packed:
        parts = {"qkv_proj": queries + 2 * keys}
    for name, outputs in parts.items():
        yield from _linear(f"self_attn.{name}", outputs, hidden, config.qkv_bias)
    yield from _linear("self_attn.o_proj", hidden, queries, config.out_bias)
    if config.query_key_norm:
        yield "self_attn.q_norm.weight", (head,)
        yield "self_attn.k_norm.weight", (head,)
    if layer.sparse and config.experts is not None:
        yield from _experts(description, config.experts)
        return
    inner = description.intermediate_size
    parts = {"gate_up_proj": 2 * inner} if config.packed else {"gate_proj": inner, "up_proj": inner}
    for name, outputs in parts.items():
        yield from _linear(f"mlp.{name}", outputs, hidden, config.mlp_bias)
    yield from _linear("mlp.down_proj", hidden, inner, config.mlp_bias)


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> Shapes:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _experts(description: ModelDescription, experts: ExpertsConfig) -> Shapes:
    hidden = description.hidden_size
    yield f"{experts.block}.gate.weight", (experts.count, hidden)
    each = [(f"experts.{index}.", experts.size) for index in range(experts.count)]
    if experts.shared is not None:
        yield f"{experts.block}.shared_expert_gate.weight", (1, hidden)
        each.append(("shared_expert.", experts.shared))
    for name, size in each:
        prefix = f"{experts.block}.{name}"
        yield f"{prefix}{experts.gate}.weight", (size, hidden)
        yield f"{prefix}{experts.up}.weight", (size, hidden)
        yield f"{prefix}{experts.down}.weight", (hidden, size)
