"""What the sampling stages get for one piece: dense arrays of R rows, made anew each step.

A row cannot inherit anything from whoever was there before. What nobody asks for is None, and its
stage does not run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen
from hardpoint.errors import InvalidRequestError
from numpy.typing import NDArray

from hardpoint_tpu.draws import keys
from hardpoint_tpu.request_columns import Feature
from hardpoint_tpu.requests import Requests, RequestState

if TYPE_CHECKING:
    from hardpoint.messages import GrammarOutput
    from hardpoint.sampling_params import SamplingParams

Flags = NDArray[np.bool_]
Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@frozen(kw_only=True, eq=False)
class DrawArrays:
    """``numbers`` float32 [3, R]: temperature, min-p, top-p; ``top_k`` int32 [R]; ``keys`` uint32
    [2, R].
    """

    numbers: Floats
    top_k: Ints
    keys: NDArray[np.uint32]


@frozen(kw_only=True, eq=False)
class PenaltyArrays:
    """``counts`` int32 [R, V], ``prompted`` bool [R, V], ``penalties`` float32 [3, R]."""

    counts: Ints
    prompted: Flags
    penalties: Floats


@frozen(kw_only=True, eq=False)
class SamplingArrays:
    """The sampling of one piece's rows; None: nobody asks. ``draws`` None: all are greedy.

    ``edits`` are (forbidden bool [R, V], bias float32 [R, V]). ``asks`` maps a row to its
    request's parameters where it wants log-probabilities.
    """

    draws: DrawArrays | None
    edits: tuple[Flags, Floats] | None
    penalties: PenaltyArrays | None
    asks: Mapping[int, SamplingParams]


def build_sampling(
    requests: Requests,
    req_ids: Sequence[str],
    rows: int,
    *,
    vocabulary: int,
    eos_token_ids: Sequence[int] = (),
    masks: Mapping[str, Flags] | None = None,
) -> SamplingArrays:
    """Gather ``req_ids``, in row order, into arrays of ``rows`` rows. ``masks`` are the grammar's:
    request -> bool [V], true where allowed.
    """
    slots = requests.slots(req_ids)
    wishes = requests.columns["features"][slots]
    states = [requests[req_id] for req_id in req_ids]
    forbidden = _forbidden(requests, states, wishes, vocabulary, eos_token_ids, masks or {})
    bias = {
        row: states[row].sampling.logit_bias or {}
        for row in np.flatnonzero(wishes & Feature.BIAS).tolist()
    }
    asking = np.flatnonzero(wishes & Feature.LOGPROBS).tolist()
    return SamplingArrays(
        draws=_draws(requests, states, slots, rows),
        edits=_edits(forbidden, bias, rows, vocabulary) if forbidden or bias else None,
        penalties=_penalties(requests, states, slots, wishes, rows, vocabulary),
        asks={row: states[row].sampling for row in asking},
    )


def grammar_masks(grammar: GrammarOutput | None, vocabulary: int) -> dict[str, Flags]:
    """Return request -> bool [V] of what its grammar allows. Raises InvalidRequestError for a mask
    that is not as long as the vocabulary needs.
    """
    masks = {}
    for req_id, rows in zip(grammar.req_ids, grammar.masks, strict=True) if grammar else ():
        bits = rows[0] if rows else b""
        if len(bits) != -(-vocabulary // 32) * 4:
            raise InvalidRequestError(
                f"the grammar mask of request {req_id!r} has {len(bits)} bytes, a vocabulary of "
                f"{vocabulary} needs {-(-vocabulary // 32) * 4}",
                field="grammar",
            )
        unpacked = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
        masks[req_id] = unpacked[:vocabulary].astype(bool)
    return masks


def ending_words(words: Sequence[Sequence[int]], output: Sequence[int]) -> set[int]:
    """Return the last ids of the bad ``words`` whose other ids are the end of ``output``."""
    return {
        word[-1]
        for word in words
        if len(word) <= len(output) + 1
        and list(word[:-1]) == list(output[len(output) - len(word) + 1 :])
    }


def _forbidden(
    requests: Requests,
    states: Sequence[RequestState],
    wishes: NDArray[Any],
    vocabulary: int,
    eos_token_ids: Sequence[int],
    masks: Mapping[str, Flags],
) -> dict[int, Flags]:
    """Return row -> bool [V], for the rows that forbid any."""
    rows: dict[int, Flags] = {}
    rare = Feature.ALLOWED | Feature.MIN_TOKENS | Feature.BAD_WORDS
    for row, state in enumerate(states):
        mask = masks.get(state.req_id)
        if mask is None and not int(wishes[row]) & rare:
            continue
        sampling = state.sampling
        flags = np.zeros(vocabulary, bool) if mask is None else ~mask
        if sampling.allowed_token_ids is not None:
            others = np.ones(vocabulary, bool)
            others[list(sampling.allowed_token_ids)] = False
            flags |= others
        output = requests.known(state.req_id)[requests.num_prompt(state.req_id) :].tolist()
        banned = ending_words(sampling.bad_word_ids, output)
        early = len(output) < sampling.min_tokens
        form = np.flatnonzero(mask).tolist() if early and mask is not None else None
        banned |= sampling.early_ends(len(output), eos_token_ids, form)
        flags[[token for token in banned if token < vocabulary]] = True
        if flags.any():
            rows[row] = flags
    return rows


def _edits(
    forbidden: Mapping[int, Flags],
    bias: Mapping[int, Mapping[int, float]],
    rows: int,
    vocabulary: int,
) -> tuple[Flags, Floats]:
    flags = np.zeros((rows, vocabulary), bool)
    added = np.zeros((rows, vocabulary), np.float32)
    for row, mask in forbidden.items():
        flags[row] = mask
    for row, wishes in bias.items():
        added[row, list(wishes)] = np.fromiter(wishes.values(), np.float32, len(wishes))
    return flags, added


def _draws(
    requests: Requests, states: Sequence[RequestState], slots: NDArray[np.int64], rows: int
) -> DrawArrays | None:
    columns = requests.columns
    if not (columns["temperature"][slots] >= 0).any():
        return None
    numbers = np.zeros((3, rows), np.float32)
    numbers[0], numbers[2] = -1.0, 1.0
    for index, name in enumerate(("temperature", "min_p", "top_p")):
        numbers[index, : len(slots)] = columns[name][slots]
    top_k = np.zeros(rows, np.int32)
    top_k[: len(slots)] = columns["top_k"][slots]
    places = columns["num_tokens"][slots].tolist()
    return DrawArrays(
        numbers=numbers,
        top_k=top_k,
        keys=keys(((s.seed, place) for s, place in zip(states, places, strict=True)), rows),
    )


def _penalties(
    requests: Requests,
    states: Sequence[RequestState],
    slots: NDArray[np.int64],
    wishes: NDArray[Any],
    rows: int,
    vocabulary: int,
) -> PenaltyArrays | None:
    asking = np.flatnonzero(wishes & Feature.PENALTIES).tolist()
    if not asking:
        return None
    counts = np.zeros((rows, vocabulary), np.int32)
    prompted = np.zeros((rows, vocabulary), bool)
    penalties = np.zeros((3, rows), np.float32)
    penalties[0] = 1.0
    for row in asking:
        req_id = states[row].req_id
        known, prompt = requests.known(req_id), requests.num_prompt(req_id)
        prompted[row, known[:prompt]] = True
        np.add.at(counts[row], known[prompt:], 1)
        for index, name in enumerate(("repetition", "frequency", "presence")):
            penalties[index, row] = requests.columns[f"{name}_penalty"][slots[row]]
    return PenaltyArrays(counts=counts, prompted=prompted, penalties=penalties)
