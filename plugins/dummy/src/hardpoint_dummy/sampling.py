"""Choosing a token: every parameter over the fake logits, in plain Python.

Order: bias, penalties, masks, temperature, min-p, top-k, top-p, one draw. A draw is a function of
(seed, position) alone, so batch-mates, chunking and preemption cannot change it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from attrs import frozen
from hardpoint.logprob_rows import best_ranks
from hardpoint.messages import Logprobs
from hardpoint.sampling_params import SamplingParams

from hardpoint_dummy.model import FakeModel, mix

_OUT = -math.inf


@frozen(kw_only=True)
class Context:
    """What a choice may depend on beside the state. ``mask`` is a grammar row or None."""

    prompt: Sequence[int]
    output: Sequence[int]
    end_ids: frozenset[int]
    mask: bytes | None = None

    @property
    def position(self) -> int:
        """The position that the chosen token will have."""
        return len(self.prompt) + len(self.output)

    def form(self, vocabulary: int) -> frozenset[int] | None:
        """Return the ids that the mask allows; None without one."""
        mask = self.mask
        if mask is None:
            return None
        return frozenset(each for each in range(vocabulary) if mask[each // 8] >> (each % 8) & 1)


def choose(model: FakeModel, state: int, params: SamplingParams, context: Context) -> int | None:
    """Return the next token; None where the parameters leave none to choose from."""
    if params.greedy and context.mask is None and _is_plain(params, context):
        return model.best(state)
    logits = _edited(model, state, params, context)
    if max(logits) == _OUT:
        return None
    if params.greedy:
        return max(range(len(logits)), key=logits.__getitem__)
    return _draw(_candidates(logits, params), params, context.position)


def processed(
    model: FakeModel, state: int, params: SamplingParams, context: Context
) -> list[float]:
    """Return the logits that :func:`choose` chooses from: of a draw over the temperature, -inf for
    what is cut.
    """
    logits = _edited(model, state, params, context)
    if params.greedy or max(logits) == _OUT:
        return logits
    kept = {token for token, _ in _candidates(logits, params)}
    _keep(logits, kept.__contains__)
    return [logit / params.effective_temperature for logit in logits]


def logprob_row(
    logits: Sequence[float],
    token: int,
    count: int,
    listed: Collection[int] = (),
    *,
    normalised: bool = True,
) -> Logprobs:
    """Return a row of ``token``, the ``count`` best (-1: all), and the ids in ``listed``. Unless
    ``normalised``, values are the logits.
    """
    peak = max(logits)
    norm = 0.0
    if normalised and peak > _OUT:
        norm = peak + math.log(sum(math.exp(x - peak) for x in logits))
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    num_best = len(order) if count < 0 else min(count, len(order))
    ids = (token, *order[:num_best], *(i for i in order[num_best:] if i in listed))
    best = [logits[i] for i in order[:num_best]]
    last = sum(1 for x in logits if x >= best[-1]) if best else 0
    return Logprobs(
        ids=(ids,),
        values=(tuple(logits[i] - norm for i in ids),),
        ranks=((sum(1 for x in logits if x >= logits[token]), *best_ranks(best, last)),),
        num_best=num_best,
    )


def _is_plain(params: SamplingParams, context: Context) -> bool:
    return (
        params.presence_penalty == 0
        and params.frequency_penalty == 0
        and params.repetition_penalty == 1
        and not params.logit_bias
        and params.allowed_token_ids is None
        and len(context.output) >= params.min_tokens
    )


def _edited(model: FakeModel, state: int, params: SamplingParams, context: Context) -> list[float]:
    logits = model.logits(state)
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    counts = Counter(context.output)
    for token in counts.keys() | set(context.prompt):
        if params.repetition_penalty != 1:
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        if counts[token]:
            logits[token] -= counts[token] * params.frequency_penalty + params.presence_penalty
    form = context.form(len(logits))
    for token in params.early_ends(len(context.output), context.end_ids, form):
        logits[token] = _OUT
    if params.allowed_token_ids is not None:
        _keep(logits, set(params.allowed_token_ids).__contains__)
    if form is not None:
        _keep(logits, form.__contains__)
    return logits


def _keep(logits: list[float], allowed: Callable[[int], bool]) -> None:
    for token in range(len(logits)):
        if not allowed(token):
            logits[token] = _OUT


def _candidates(logits: Sequence[float], params: SamplingParams) -> list[tuple[int, float]]:
    """Return (token, probability) of those that can be drawn, most likely first."""
    temperature = params.effective_temperature
    peak = max(logits)
    weights = [(math.exp((x - peak) / temperature), token) for token, x in enumerate(logits)]
    ranked = sorted(((w, t) for w, t in weights if w >= params.min_p and w > 0), key=_best_first)
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    total = sum(weight for weight, _ in ranked)
    kept: list[tuple[int, float]] = []
    mass = 0.0
    for weight, token in ranked:
        if mass >= params.top_p < 1 and kept:
            break
        kept.append((token, weight / total))
        mass += weight / total
    return kept


def _best_first(pair: tuple[float, int]) -> tuple[float, int]:
    return (-pair[0], pair[1])


def _draw(candidates: Sequence[tuple[int, float]], params: SamplingParams, position: int) -> int:
    """Return the token at which the cumulative probability exceeds the draw of (seed, position)."""
    total = sum(probability for _, probability in candidates)
    left = mix(mix(params.seed or 0) ^ position) / 2**64 * total
    for token, probability in candidates:
        left -= probability
        if left < 0:
            return token
    return candidates[-1][0]
