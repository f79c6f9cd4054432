"""Named operations: what models are made of, and what a step does to its cache and its logits.
They are called by name, never a kernel.

The built-in ones are plain torch and run on any device. A plugin offers its own with the hook
``hardpoint_operations``; they are resolved once, when a worker loads its model: the selected
platform's own, else one for ``any`` platform, else the built-in. An offer whose ``supports`` gives
a reason is passed over, and says so in the log and in :attr:`Operations.choices`.

Shapes: T tokens, H hidden size, N outputs. ``attention`` and ``kv_write`` are described in
:mod:`hardpoint_runtime.attention.paged`, ``slot_mapping`` in
:mod:`hardpoint_runtime.attention.slots`, ``experts`` in :mod:`hardpoint_runtime.mixture`,
``zero_blocks`` and ``copy_blocks`` in :mod:`hardpoint_runtime.memory.blocks`, ``penalise`` in
:mod:`hardpoint_runtime.sampling.edits`, what filters logits in
:mod:`hardpoint_runtime.sampling.filters`, and ``accept_greedy`` and ``accept_drawn``, which wait
for a runner that verifies drafts, in :mod:`hardpoint_runtime.sampling.rejection`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the field's habit
from attrs import evolve, fields, frozen
from hardpoint.errors import PluginError
from hardpoint.offers import reason_against
from hardpoint.records import AnyPlatform, Offer
from hardpoint.references import resolve as resolve_reference

from hardpoint_runtime.attention import paged
from hardpoint_runtime.attention.slots import SlotMapping, slot_mapping
from hardpoint_runtime.memory import blocks
from hardpoint_runtime.mixture import experts
from hardpoint_runtime.sampling import edits, filters, rejection

if TYPE_CHECKING:
    from hardpoint_runtime.attention.metadata import AttentionMetadata

_logger = logging.getLogger("hardpoint.operations")

Tensor = torch.Tensor


class Offers(Protocol):
    """What is needed of a :class:`hardpoint.registry.Registry`."""

    def offers(
        self, hook: str, platform_name: str, description: Mapping[str, object] | None = None
    ) -> Mapping[str, Offer]:
        """Return the winning offer of each name."""

    def candidates(self, hook: str) -> Sequence[tuple[object, Offer]]:
        """Return every offer with its plugin."""


class KVWrite(Protocol):
    """Writes a step's keys and values into the cache."""

    def __call__(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """See :func:`hardpoint_runtime.attention.paged.kv_write`."""


class Attention(Protocol):
    """Attends over the paged cache."""

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        alibi: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hardpoint_runtime.attention.paged.attention`. Models give only the options
        that they need.
        """


class CopyBlocks(Protocol):
    """Copies blocks of the KV cache."""

    def __call__(
        self, planes: Sequence[Tensor], sources: Tensor, targets: Tensor, *, overlapping: bool
    ) -> None:
        """See :func:`hardpoint_runtime.memory.blocks.copy_blocks`."""


class DrawTruncated(Protocol):
    """Draws tokens of rows that are cut by top-k or top-p."""

    def __call__(
        self,
        scaled: Tensor,
        keys: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        *,
        largest_k: int,
        all_cut_by_k: bool,
        anyone: Callable[[Tensor], list[int]],
    ) -> Tensor:
        """See :func:`hardpoint_runtime.sampling.filters.draw_truncated`."""


class AcceptDrawn(Protocol):
    """Decides which drafted tokens stay, where tokens are drawn."""

    def __call__(
        self,
        drafts: Tensor,
        starts: Tensor,
        target: Tensor,
        proposed: Tensor | None,
        shares: Tensor,
        keys: Tensor,
        bonus: Tensor,
        most: int,
    ) -> Tensor:
        """See :func:`hardpoint_runtime.sampling.rejection.accept_drawn`."""


class Experts(Protocol):
    """Computes what a mixture of experts does behind its router."""

    def __call__(
        self,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        chosen: Tensor,
        weights: Tensor,
        *,
        activate: Callable[[Tensor], Tensor],
        fixed: bool,
    ) -> Tensor:
        """See :func:`hardpoint_runtime.mixture.experts`."""


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Return rows ``token_ids`` [T] of ``weight`` [V, H]."""
    return F.embedding(token_ids, weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x`` [T, K] times ``weight`` [N, K] transposed, plus ``bias`` [N]: [T, N],
    contiguous.
    """
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension, computed in
    float32 (Zhang and Sennrich, 2019), in the type of ``x``; ``weight`` may be float32 beside it.
    """
    if x.dtype != weight.dtype:
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of ``x + residual``, and that sum. May change ``residual`` in place."""
    total = residual.add_(x)
    return rms_norm(total, weight, eps), total


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves of each head of ``x`` [T, heads, D] by the angles of its token.

    ``cos`` and ``sin`` are float32 [T, 1, D]; ``sin`` is negative in the first half: ``x * cos +
    swapped halves * sin`` (Su et al., 2021, in the layout of GPT-NeoX and Llama).
    """
    tokens, heads, head = x.shape
    swapped = x.view(tokens, heads, 2, head // 2).flip(2).view(tokens, heads, head)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """Return ``silu(first half) * second half`` of ``x`` [T, 2 * N]."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """Return ``gelu(first half) * second half`` of ``x`` [T, 2 * N], gelu by its approximation with
    tanh (Hendrycks and Gimpel, 2016).
    """
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


@frozen(kw_only=True)
class Choice:
    """What became of one operation: the reference in use (``built-in``), and why not another."""

    name: str
    reference: str
    passed_over: tuple[str, ...] = ()


@frozen(kw_only=True)
class Operations:
    """The operations in use by one model. ``choices`` says where each comes from."""

    embedding: Callable[[Tensor, Tensor], Tensor] = embedding
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = linear
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = add_rms_norm
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor] = rotary
    silu_and_mul: Callable[[Tensor], Tensor] = silu_and_mul
    gelu_tanh_and_mul: Callable[[Tensor], Tensor] = gelu_tanh_and_mul
    experts: Experts = experts
    kv_write: KVWrite = paged.kv_write
    attention: Attention = paged.attention
    slot_mapping: SlotMapping = slot_mapping
    zero_blocks: Callable[[Sequence[Tensor], Tensor], None] = blocks.zero_blocks
    copy_blocks: CopyBlocks = blocks.copy_blocks
    penalise: edits.Penalise = edits.penalise_places
    temper: Callable[[Tensor, Tensor | None, Tensor | None], Tensor] = filters.tempered
    truncate: Callable[[Tensor, Tensor, Tensor], Tensor] = filters.truncated
    draw_truncated: DrawTruncated = filters.draw_truncated
    accept_greedy: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor] = rejection.accept_greedy
    accept_drawn: AcceptDrawn = rejection.accept_drawn
    choices: tuple[Choice, ...] = ()

    @property
    def maps_slots(self) -> bool:
        """Whether something better is offered than to find cache slots on the host."""
        return self.slot_mapping is not slot_mapping


HOOK = "hardpoint_operations"
NAMES = tuple(each.name for each in fields(Operations) if each.name != "choices")
"""The operations that can be offered."""


def resolve(
    registry: Offers | None, platform_name: str, description: Mapping[str, object]
) -> Operations:
    """Return the operations to use on ``platform_name``. Called once, when the model is built.

    ``description`` is plain data about what they must serve: ``device`` (torch's type), ``dtype``
    and ``kv_cache_dtype`` (names), ``head_size``, ``num_heads``, ``num_kv_heads``, ``block_size``,
    and whether attention is asked with a ``window`` or a ``softcap``; each offer's ``supports``
    gets it. Raises PluginError for an operation that no runner calls, and what resolving a
    reference raises.
    """
    if registry is None:
        return Operations(choices=tuple(Choice(name=n, reference="built-in") for n in NAMES))
    every = [offer for _, offer in registry.candidates(HOOK)]
    for offer in every:
        if offer.name not in NAMES:
            raise PluginError(
                f"operation {offer.name!r} (offered as {offer.reference}) is none that runners "
                f"call; they call {', '.join(NAMES)}"
            )
    chosen = registry.offers(HOOK, platform_name, description)
    choices = tuple(
        Choice(
            name=name,
            reference=chosen[name].reference if name in chosen else "built-in",
            passed_over=_reasons(name, every, platform_name, description),
        )
        for name in NAMES
    )
    _log(choices)
    found: dict[str, Any] = {n: resolve_reference(offer.reference) for n, offer in chosen.items()}
    return evolve(Operations(), **found, choices=choices)


def _reasons(
    name: str, offers: Sequence[Offer], platform_name: str, description: Mapping[str, object]
) -> tuple[str, ...]:
    """Return why the offers that could have served this platform do not serve ``description``."""
    found = []
    for offer in offers:
        if offer.name == name and offer.platform in (platform_name, AnyPlatform):
            reason = reason_against(offer, description)
            if reason is not None:
                found.append(f"{offer.reference}: {reason}")
    return tuple(found)


def _log(choices: Sequence[Choice]) -> None:
    for choice in choices:
        if choice.passed_over:
            reasons = "; ".join(choice.passed_over)
            _logger.info("operation %s: %s, since %s", choice.name, choice.reference, reasons)
