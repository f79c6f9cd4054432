"""What a model's files say of it, as plain data; read in the driver before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attrs import field, frozen


@frozen(kw_only=True)
class ModelDescription:
    """A model's shape and origin.

    ``architecture`` is the Hugging Face class name (``LlamaForCausalLM``) for every format.
    ``format`` is ``safetensors`` or ``gguf``. ``stored_dtype`` is the dtype of the stored weights
    (``float32``, ``bfloat16``, ...; ``packed`` for block-quantised GGUF). ``context_length`` is in
    tokens. ``hf_config`` is the config.json, or the same keys made from GGUF metadata
    (``rope_theta``, ``rms_norm_eps``, ``tie_word_embeddings`` ...).
    """

    path: Path
    format: str
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    context_length: int
    stored_dtype: str
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    hf_config: Mapping[str, object] = field(factory=dict)
