"""The shape of a Llama as the programs need it, read from the model's description. Imports no JAX,
so the driver can check a model with it.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.errors import UnsupportedError, UnsupportedModelError

from hardpoint_tpu.heads import HeadLayout, head_layout

ARCHITECTURE = "LlamaForCausalLM"
_MODEL = "the model of platform 'tpu'"


@frozen(kw_only=True)
class ModelShape:
    """Sizes in elements. ``theta`` is the base of the rotary angles (Su et al., 2021), ``eps`` that
    of the norms (Zhang and Sennrich, 2019). ``layout`` is what each of the devices holds.
    """

    layers: int
    hidden: int
    inner: int
    head: int
    vocabulary: int
    theta: float
    eps: float
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    layout: HeadLayout

    @property
    def devices(self) -> int:
        """How many devices share each layer."""
        return self.layout.devices

    @classmethod
    def of(cls, description: ModelDescription, devices: int) -> ModelShape:
        """Return the shape on ``devices``. Raises UnsupportedModelError for another architecture,
        UnsupportedError for an activation or a rotary scaling that is not known here, or for heads
        that cannot be spread.
        """
        if description.architecture != ARCHITECTURE:
            raise UnsupportedModelError(
                f"{description.path}: platform 'tpu' knows no {description.architecture}; it runs "
                f"{ARCHITECTURE}"
            )
        config = description.hf_config
        if (activation := config.get("hidden_act", "silu")) != "silu":
            raise UnsupportedError(f"the activation {activation!r}", _MODEL)
        return cls(
            layers=description.num_layers,
            hidden=description.hidden_size,
            inner=description.intermediate_size,
            head=description.head_size,
            vocabulary=description.vocab_size,
            theta=_theta(config),
            eps=float(str(config.get("rms_norm_eps", 1e-6))),
            tied=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            layout=head_layout(description.num_heads, description.num_kv_heads, devices),
        )


def _theta(config: Mapping[str, object]) -> float:
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parameters: Mapping[str, object] = stated if isinstance(stated, Mapping) else {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise UnsupportedError(f"rotary scaling {kind!r}", _MODEL, hint="Only 'default' is known.")
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0
    return float(str(theta))
