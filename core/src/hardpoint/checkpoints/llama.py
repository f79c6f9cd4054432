"""The tensors of a Llama-architecture model: Hugging Face names and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.tables import shown, some
from hardpoint.errors import CheckpointError

TENSORS_OF_A_LAYER = 9


def expected_shapes(description: ModelDescription) -> dict[str, tuple[int, ...]]:
    """Return the tensors that every model of this shape has, without optional biases.

    A tied model needs no ``lm_head.weight``; linear weights are (outputs, inputs).
    """
    hidden, inner = description.hidden_size, description.intermediate_size
    queries = description.num_heads * description.head_size
    keys = description.num_kv_heads * description.head_size
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (description.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not description.hf_config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (description.vocab_size, hidden)
    for index in range(description.num_layers):
        for part, shape in layer.items():
            shapes[f"model.layers.{index}.{part}.weight"] = shape
    return shapes


def check_shapes(
    path: Path, description: ModelDescription, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise CheckpointError unless the files hold every tensor that the description implies.

    So no worker is started, and nothing is allocated, for a description that the files belie.
    ``shapes`` maps Hugging Face names to what the files hold.
    """
    if description.num_layers * TENSORS_OF_A_LAYER > len(shapes):
        raise CheckpointError(
            f"{path}: the configuration says {description.num_layers} layers, but there are only "
            f"{len(shapes)} tensors: a part of the model is missing"
        )
    expected = expected_shapes(description)
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
