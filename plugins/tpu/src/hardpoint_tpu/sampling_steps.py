"""Choosing tokens on the device: logits [R, V] float32 in, a token for each row out.

Row by row, so that a row's neighbours have no say. Order, as documented for all platforms:
forbidden tokens (allowed ids, grammar, bad words, minimum length), bias, penalties, greedy choice;
for rows that draw: temperature, min-p, top-k, top-p, draw. Cuts are found by bisection over the
bits of the values, not by sorting, and exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from hardpoint_tpu.draws import exponential

NO_CHOICE = 0
"""The token of a row that has nothing to choose from."""
NOTHING_LEFT = -1
"""The count of wrong logits of a row whose logits are all -inf."""


def edit(logits: jax.Array, forbidden: jax.Array, bias: jax.Array) -> jax.Array:
    """Return the logits, -inf where ``forbidden`` [R, V], with ``bias`` [R, V] elsewhere."""
    return jnp.where(forbidden, -jnp.inf, logits + bias)


def penalise(
    logits: jax.Array, counts: jax.Array, prompted: jax.Array, penalties: jax.Array
) -> jax.Array:
    """Return the logits with the penalties [3, R] (repetition, frequency, presence) applied.

    ``counts`` int32 [R, V]: how often the output has each token; ``prompted`` bool [R, V]: whether
    the prompt has it. Repetition r over both (Keskar et al., 2019; negative logits as the field
    does): x > 0 becomes x / r, else x * r. Then, for the output: minus frequency * count, minus
    presence.
    """
    repetition, frequency, presence = (row[:, None] for row in penalties)
    said = counts > 0
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(said | prompted, repeated, logits)
    taken = frequency * counts.astype(jnp.float32) + presence
    return jnp.where(said, logits - taken, logits)


def greedy(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (the best token int32 [R], the lowest id among equals; how many logits are no number,
    int32 [R]).

    Rows with NaN or +inf, or with -inf only, get NO_CHOICE and a count that is not 0; in the last
    case it is NOTHING_LEFT.
    """
    wrong = (jnp.isnan(logits) | (logits == jnp.inf)).sum(-1, dtype=jnp.int32)
    peak = logits.max(-1)
    wrong = jnp.where((wrong == 0) & (peak == -jnp.inf), NOTHING_LEFT, wrong)
    best = jnp.argmax(logits, -1).astype(jnp.int32)
    return jnp.where(wrong != 0, NO_CHOICE, best), wrong


def draw(
    logits: jax.Array, numbers: jax.Array, top_k: jax.Array, keys: jax.Array, steps: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return as :func:`greedy`, with rows drawn whose temperature is not negative.

    ``numbers`` float32 [3, R]: temperature (negative: greedy), min-p, top-p (1: off). ``top_k``
    int32 [R] (0: off). ``keys`` uint32 [2, R] and ``steps`` uint32 [2, V] as in
    :mod:`hardpoint_tpu.draws`.
    """
    best, wrong = greedy(logits)
    scaled, _ = _cut(logits, numbers, top_k)
    raced = jnp.exp(scaled) / exponential(keys, steps)
    drawn = jnp.argmax(raced, -1).astype(jnp.int32)
    return jnp.where((numbers[0] >= 0) & (wrong == 0), drawn, best), wrong


def processed(logits: jax.Array, numbers: jax.Array, top_k: jax.Array) -> jax.Array:
    """Return the logits [R, V] that :func:`draw` chooses from: of rows that are drawn over the
    temperature, -inf for what is cut.
    """
    scaled, peak = _cut(logits, numbers, top_k)
    return jnp.where((numbers[0] >= 0)[:, None], scaled + peak, logits)


def _cut(logits: jax.Array, numbers: jax.Array, top_k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the logits over the temperature, the best of each row moved to 0 and -inf for what
    min-p, top-k and top-p drop; and where the best was, [R, 1].
    """
    temperature, min_p, top_p = numbers
    scaled = logits / jnp.where(temperature >= 0, temperature, 1.0)[:, None]
    peak = scaled.max(-1, keepdims=True)
    scaled = scaled - peak
    # A probability over the best one's is exp(scaled): min-p needs no normalisation.
    scaled = jnp.where(jnp.exp(scaled) < min_p[:, None], -jnp.inf, scaled)
    scaled = lax.cond(jnp.any(top_k > 0), _within_top_k, lambda x, _: x, scaled, top_k)
    scaled = lax.cond(jnp.any(top_p < 1), _within_top_p, lambda x, _: x, scaled, top_p)
    return scaled, peak


def _rank_bits(scaled: jax.Array) -> jax.Array:
    """Return int32 [R, V] that grow as ``scaled`` (at most 0) falls: the bits of its magnitude."""
    return lax.bitcast_convert_type(jnp.abs(scaled), jnp.int32)


def _least(reached: Callable[[jax.Array], jax.Array], rows: int, bits: int) -> jax.Array:
    """Return int32 [rows]: the least number of ``bits`` bits for which ``reached`` is true, which
    it is for all greater ones too.
    """

    def halve(index: jax.Array, bound: jax.Array) -> jax.Array:
        # It is false for every number below ``bound``.
        tried = bound + (jnp.int32(1) << (bits - 1 - index))
        return jnp.where(reached(tried - 1), bound, tried)

    return lax.fori_loop(0, bits, halve, jnp.zeros(rows, jnp.int32))


def _within_top_k(scaled: jax.Array, top_k: jax.Array) -> jax.Array:
    """Keep what is no worse than the k-th best of its row, ties included."""
    ranks = _rank_bits(scaled)
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, scaled.shape[1]), scaled.shape[1])

    def enough(bound: jax.Array) -> jax.Array:
        return (ranks <= bound[:, None]).sum(-1) >= wanted

    kth = _least(enough, len(top_k), 31)
    return jnp.where(ranks <= kth[:, None], scaled, -jnp.inf)


def _within_top_p(scaled: jax.Array, top_p: jax.Array) -> jax.Array:
    """Keep the best of each row until their share of what is left reaches p; at least one. Among
    equals at the edge, those of the lowest ids.
    """
    ranks = _rank_bits(scaled)
    weights = jnp.exp(scaled)
    wanted = top_p * weights.sum(-1)

    def enough(bound: jax.Array) -> jax.Array:
        return jnp.where(ranks <= bound[:, None], weights, 0.0).sum(-1) >= wanted

    edge = _least(enough, len(top_p), 31)
    better = ranks < edge[:, None]
    equal = ranks == edge[:, None]
    missing = wanted - jnp.where(better, weights, 0.0).sum(-1)
    worth = jnp.exp(-lax.bitcast_convert_type(edge, jnp.float32))
    count = jnp.maximum(jnp.ceil(missing / worth), 1)
    ids = jnp.arange(scaled.shape[1], dtype=jnp.int32)

    def holds(bound: jax.Array) -> jax.Array:
        return (equal & (ids <= bound[:, None])).sum(-1) >= count

    last = _least(holds, len(top_p), scaled.shape[1].bit_length())
    kept = better | (equal & (ids <= last[:, None]))
    return jnp.where(kept | (top_p >= 1)[:, None], scaled, -jnp.inf)


def gather(
    logits: jax.Array, tokens: jax.Array, count: int, normalised: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return (log-probability float32 [R] of ``tokens``, rank int32 [R], ids int32 [R, count] and
    log-probabilities [R, count] of the best, the lowest ids first among equals, and the rank int32
    [R] of the last of them); the logits themselves unless ``normalised``.

    A rank is how many are not below; the token's is at least 1.
    """
    values = scores(logits, normalised)
    own = jnp.take_along_axis(values, tokens[:, None], axis=1)
    ranks = jnp.maximum((values >= own).sum(-1, dtype=jnp.int32), 1)
    best, ids = lax.top_k(values, count)
    last = (values >= best[:, -1:]).sum(-1, dtype=jnp.int32)
    return own[:, 0], ranks, ids, best, last


def scores(logits: jax.Array, normalised: bool = True) -> jax.Array:
    """Return log-probabilities [R, V], or the logits themselves unless ``normalised``."""
    return jax.nn.log_softmax(logits, -1) if normalised else logits
