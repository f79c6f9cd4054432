"""Decoder models as data: all that a built-in model is built from, read from its configuration.

One record for every architecture. What an architecture is, is a function in
:mod:`hardpoint.checkpoints.decoder_architectures` that fills it in.
"""

from __future__ import annotations

from attrs import frozen

from hardpoint.checkpoints.rotary import RotaryConfig


@frozen(kw_only=True)
class ExpertsConfig:
    """A mixture of experts in place of an MLP: ``count`` gated MLPs of ``size`` inner columns, of
    which each token takes the ``per_token`` that the router likes best.

    Weights are softmax over all experts in float32, of those taken; ``normalised``: brought to a
    sum of one. ``shared``: the inner columns of one more, which every token takes, times the
    sigmoid of a router of its own; None: there is none. ``block`` is the mixture's name in a
    layer, ``gate``, ``up`` and ``down`` those of an expert's matrices.
    """

    count: int
    per_token: int
    size: int
    normalised: bool
    shared: int | None = None
    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@frozen(kw_only=True)
class LayerConfig:
    """What may differ between layers. ``window``: a token sees as many, its own included; None:
    all. ``rotary``: index in :attr:`DecoderConfig.rotaries`. ``sparse``: has experts.
    """

    window: int | None = None
    rotary: int = 0
    sparse: bool = False


@frozen(kw_only=True)
class DecoderConfig:
    """A decoder with grouped-query attention, rotary positions, RMS norms and gated MLPs.

    ``layers`` has one entry a layer. ``norms_around``: attention and MLP have a norm behind them
    too, not only before. ``norm_offset`` is added to the weights of norms. ``query_key_norm``: a
    norm over each head of queries and keys before they are turned. ``packed``: the checkpoint has
    one matrix ``qkv_proj`` and one ``gate_up_proj``. ``activation`` is ``silu`` or ``gelu_tanh``.
    ``attention_cap`` and ``logit_cap``: ``cap * tanh(x / cap)`` of scores and logits.
    """

    layers: tuple[LayerConfig, ...]
    rotaries: tuple[RotaryConfig, ...]
    norm_eps: float
    tied: bool
    query_scale: float
    activation: str = "silu"
    norm_offset: float = 0.0
    norms_around: bool = False
    query_key_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    packed: bool = False
    attention_cap: float | None = None
    logit_cap: float | None = None
    embedding_scale: float = 1.0
    experts: ExpertsConfig | None = None
