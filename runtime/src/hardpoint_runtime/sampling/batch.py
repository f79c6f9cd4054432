"""What the sampler must know about the rows of one step, gathered from the requests.

Built anew each step from columns and from what is kept with each request: a row cannot inherit
anything from whoever had its place before.
What nobody in the step uses is None, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from attrs import field, frozen
from hardpoint.errors import InvalidRequestError

from hardpoint_runtime.batch.columns import Array
from hardpoint_runtime.sampling.columns import Feature
from hardpoint_runtime.sampling.draws import keys
from hardpoint_runtime.sampling.edits import (
    Penalties,
    Places,
    gather_penalties,
)
from hardpoint_runtime.sampling.logprobs import LogprobAsk, ask

if TYPE_CHECKING:
    from hardpoint.messages import GrammarOutput

    from hardpoint_runtime.batch.requests import Requests, RequestState
    from hardpoint_runtime.sampling.processors import AppliedProcessors

PENALTY_COLUMNS = ("repetition_penalty", "frequency_penalty", "presence_penalty")


@frozen(kw_only=True, eq=False)
class Draws:
    """The rows that are drawn at random, all arrays [m]: ``rows`` int64 in the batch,
    ``temperature``, ``keys`` int64 of the draws, and ``min_p``, ``top_k`` (0: off), ``top_p`` or
    None where no row uses it.
    """

    rows: Array
    temperature: Array
    keys: Array
    min_p: Array | None = None
    top_k: Array | None = None
    top_p: Array | None = None


@frozen(kw_only=True, eq=False)
class SamplingBatch:
    """The sampling of one step's n rows; None and () mean that nobody asks.

    ``draws`` None: every row is greedy. ``bias`` are places and their additions. ``grammar`` maps a
    row to bool [V], true where allowed.
    """

    num_rows: int
    draws: Draws | None = None
    allowed: Places | None = None
    banned: Places | None = None
    bias: tuple[Places, Array] | None = None
    penalties: Penalties | None = None
    processors: AppliedProcessors | None = None
    grammar: Mapping[int, Array] = field(factory=dict)
    logprobs: tuple[LogprobAsk, ...] = ()

    @property
    def edits_logits(self) -> bool:
        """Whether any row's logits are changed before the choice."""
        wishes = (self.allowed, self.banned, self.bias, self.penalties)
        changing = self.processors is not None and self.processors.changing
        return bool(self.grammar or changing) or any(wish is not None for wish in wishes)


def build_sampling_batch(
    requests: Requests,
    req_ids: Sequence[str],
    *,
    vocab_size: int,
    eos_token_ids: Sequence[int] = (),
    grammar: GrammarOutput | None = None,
    processors: AppliedProcessors | None = None,
) -> SamplingBatch:
    """Gather the rows ``req_ids`` (all of them can be sampled) for the sampler.

    Raises InvalidRequestError if a grammar mask is not as long as the vocabulary needs.
    """
    states = [requests[req_id] for req_id in req_ids]
    slots = np.asarray([state.slot for state in states], dtype=np.int64)
    columns = requests.columns
    features = columns.gather("features", slots)
    asked = int(np.bitwise_or.reduce(features, initial=0))
    positions = columns.gather("num_tokens", slots)

    def rows_with(feature: Feature) -> list[int]:
        found: list[int] = np.flatnonzero(features & feature).tolist() if asked & feature else []
        return found

    masks = _masks(req_ids, grammar, vocab_size)

    return SamplingBatch(
        num_rows=len(states),
        draws=_draws(requests, states, slots, positions, vocab_size),
        allowed=_allowed(states, rows_with(Feature.ALLOWED)),
        banned=_places(
            (row, _banned(requests, states[row], eos_token_ids, masks.get(row)))
            for row in rows_with(Feature.MIN_TOKENS | Feature.BAD_WORDS)
        ),
        bias=_bias(states, rows_with(Feature.BIAS)),
        processors=processors,
        penalties=_penalties(requests, states, slots, rows_with(Feature.PENALTIES)),
        grammar=masks,
        logprobs=tuple(
            ask(row, states[row].sampling, vocab_size) for row in rows_with(Feature.LOGPROBS)
        ),
    )


def _draws(
    requests: Requests,
    states: Sequence[RequestState],
    slots: Array,
    positions: Array,
    vocab_size: int,
) -> Draws | None:
    temperature = requests.columns.gather("temperature", slots)
    rows = np.flatnonzero(temperature)
    if not len(rows):
        return None
    chosen = slots[rows]
    min_p = requests.columns.gather("min_p", chosen)
    top_k = requests.columns.gather("top_k", chosen)
    top_k[top_k >= vocab_size] = 0
    top_p = requests.columns.gather("top_p", chosen)
    cuts = bool((top_k > 0).any() or (top_p < 1).any())
    return Draws(
        rows=rows,
        temperature=temperature[rows],
        keys=keys((states[row].seed, int(positions[row])) for row in rows.tolist()),
        min_p=min_p if min_p.any() else None,
        top_k=top_k if cuts else None,
        top_p=top_p if cuts else None,
    )


def _banned(
    requests: Requests,
    state: RequestState,
    eos_token_ids: Sequence[int],
    mask: Array | None,
) -> Iterable[int]:
    """Return the ids that a request must not have next: early ends, and ends of bad words."""
    sampling = state.sampling
    output = requests.tokens(state.req_id)[requests.columns["num_prompt"][state.slot] :]
    form = None if mask is None else np.flatnonzero(mask).tolist()
    banned = sampling.early_ends(len(output), eos_token_ids, form)
    if sampling.bad_word_ids:
        banned |= state.kept.words(sampling).ends(output)
    return banned


def _places(wishes: Iterable[tuple[int, Iterable[int]]]) -> Places | None:
    rows: list[int] = []
    ids: list[int] = []
    for row, wanted in wishes:
        unique = set(wanted)
        rows += [row] * len(unique)
        ids += unique
    return Places(rows=np.asarray(rows), ids=np.asarray(ids)) if ids else None


def _allowed(states: Sequence[RequestState], rows: Sequence[int]) -> Places | None:
    if not rows:
        return None
    return Places.of_rows(rows, [states[row].kept.allowed(states[row].sampling) for row in rows])


def _bias(states: Sequence[RequestState], rows: Sequence[int]) -> tuple[Places, Array] | None:
    if not rows:
        return None
    ids, values = zip(*(states[row].kept.bias(states[row].sampling) for row in rows), strict=True)
    return Places.of_rows(rows, ids), np.concatenate(values)


def _penalties(
    requests: Requests, states: Sequence[RequestState], slots: Array, rows: list[int]
) -> Penalties | None:
    if not rows:
        return None
    columns = requests.columns
    num_prompt = columns.gather("num_prompt", slots[rows]).tolist()
    return gather_penalties(
        rows,
        [
            states[row].kept.counts(requests.tokens(states[row].req_id), count)
            for row, count in zip(rows, num_prompt, strict=True)
        ],
        {name: columns.gather(name, slots[rows]) for name in PENALTY_COLUMNS},
    )


def _masks(
    req_ids: Sequence[str], grammar: GrammarOutput | None, vocab_size: int
) -> dict[int, Array]:
    if grammar is None:
        return {}
    row_of = {req_id: row for row, req_id in enumerate(req_ids)}
    masks = {}
    for req_id, rows in zip(grammar.req_ids, grammar.masks, strict=True):
        bits = rows[0] if rows else b""
        if len(bits) != -(-vocab_size // 32) * 4:
            raise InvalidRequestError(
                f"the grammar mask of request {req_id!r} has {len(bits)} bytes, a vocabulary of "
                f"{vocab_size} needs {-(-vocab_size // 32) * 4}",
                field="grammar",
            )
        # A structured request whose prompt is unfinished has a mask but no row.
        if req_id in row_of:
            unpacked = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")
            masks[row_of[req_id]] = unpacked[:vocab_size].astype(bool)
    return masks
