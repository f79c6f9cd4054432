"""From the graph mode that is asked for to the one that can be had, with every reason."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

from attrs import frozen
from hardpoint.errors import ConfigError

from hardpoint_runtime.graphs.modes import GraphMode


class AttentionSupport(enum.IntEnum):
    """Which batches an attention implementation can run inside a FULL graph, rising: what supports
    a level supports those below.
    """

    NEVER = 0
    SINGLE_TOKEN_DECODE = 1
    """Every request has one token."""
    UNIFORM_BATCH = 2
    """Every request has the same number of tokens."""
    ALWAYS = 3

    @staticmethod
    def least(levels: Iterable[AttentionSupport]) -> AttentionSupport:
        """Return what all of several implementations support; ALWAYS for none."""
        return min(levels, default=AttentionSupport.ALWAYS)


@frozen(kw_only=True)
class Resolved:
    """``mode`` is what can be had; ``reasons`` says why it is not what was asked for, one for each
    step down. Empty: it is.
    """

    mode: GraphMode
    reasons: tuple[str, ...] = ()

    def require(self, asked: GraphMode) -> GraphMode:
        """Return the mode if it is ``asked``, which the user set. Raises ConfigError with the
        reasons and what can be had: an explicit value is never overridden.
        """
        if self.mode is asked:
            return asked
        raise ConfigError(
            f"graph_mode = {asked.value!r} cannot be honoured: {'; '.join(self.reasons)}. Set "
            f"graph_mode = {self.mode.value!r}, or leave it unset"
        )


def resolve(
    mode: GraphMode,
    support: AttentionSupport,
    *,
    uniform_query: int = 1,
    splittable: bool = True,
    forbidden: Mapping[GraphMode, str] | None = None,
) -> Resolved:
    """Return the mode nearest to ``mode`` that can be had. Pure.

    ``support`` is the least of all attention implementations' (:meth:`AttentionSupport.least`), as
    a FULL graph holds attention too. ``uniform_query`` is 1 + the number of drafts.
    ``splittable``: the model can be split at its attention layers. ``forbidden`` maps FULL or
    PIECEWISE to why something else in this engine rules it out.

    Raises ConfigError for FULL where attention supports it NEVER and no pieces can be had.
    """
    refused = dict(forbidden or {})
    if not splittable:
        refused.setdefault(GraphMode.PIECEWISE, "the model cannot be split at its attention layers")
    fallback = GraphMode.NONE if GraphMode.PIECEWISE in refused else GraphMode.PIECEWISE
    if mode is GraphMode.FULL and support is AttentionSupport.NEVER and fallback is GraphMode.NONE:
        raise ConfigError(
            "graph_mode = 'full': attention does not support it, and PIECEWISE cannot be had "
            f"instead: {refused[GraphMode.PIECEWISE]}. Set graph_mode = 'none', or leave it unset"
        )
    reasons: list[str] = []
    decode, mixed = mode.decode, mode.mixed
    if mode.needs_splitting and fallback is GraphMode.NONE:
        reasons.append(f"nothing runs in PIECEWISE: {refused[GraphMode.PIECEWISE]}")
        decode, mixed = (
            GraphMode.NONE if part is GraphMode.PIECEWISE else part for part in (decode, mixed)
        )
    if mixed is GraphMode.FULL and (why := _against_mixed(support, refused)):
        mixed = fallback
        reasons.append(f"mixed batches run in {mixed.name} instead of FULL: {why}")
    if decode is GraphMode.FULL and (why := _against_decode(support, uniform_query, refused)):
        decode = mixed = fallback  # no mode has graphs of pieces for decode batches only
        reasons.append(f"all batches run in {decode.name}, decode ones not in FULL: {why}")
    return Resolved(mode=GraphMode.pair(decode, mixed), reasons=tuple(reasons))


def _against_mixed(support: AttentionSupport, refused: Mapping[GraphMode, str]) -> str | None:
    if GraphMode.FULL in refused:
        return refused[GraphMode.FULL]
    if support < AttentionSupport.ALWAYS:
        return f"attention supports FULL for {support.name} only"
    return None


def _against_decode(
    support: AttentionSupport, uniform_query: int, refused: Mapping[GraphMode, str]
) -> str | None:
    if GraphMode.FULL in refused:
        return refused[GraphMode.FULL]
    if support is AttentionSupport.NEVER:
        return "attention does not support FULL"
    if uniform_query > 1 and support < AttentionSupport.UNIFORM_BATCH:
        return (
            f"a decode batch has {uniform_query} tokens a request, and attention supports FULL for "
            f"{support.name} only"
        )
    return None
