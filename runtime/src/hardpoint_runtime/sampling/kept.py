"""What the sampler needs of one request in every step, kept between steps: a step costs what is new
in it, not what the request has said or named so far.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from attrs import define

from hardpoint_runtime.batch.columns import Array

if TYPE_CHECKING:
    from hardpoint.sampling_params import SamplingParams


class TokenCounts:
    """How often each token is in the output of a request. Tokens of the prompt are there, too."""

    def __init__(self, known: Array, num_prompt: int) -> None:
        """Count ``known``, int32 [n]: prompt, then output."""
        ids, places = np.unique(known, return_inverse=True)
        counts = np.bincount(places[num_prompt:], minlength=len(ids))
        self._ids, self._counts = ids, counts.astype(np.float32)
        self._place_of = {token: place for place, token in enumerate(ids.tolist())}
        self._length = len(known)

    @property
    def ids(self) -> Array:
        """The tokens of prompt and output, int32 [m], each once; a view."""
        return self._ids[: len(self._place_of)]

    @property
    def counts(self) -> Array:
        """How often each of them is in the output, float32 [m]; a view."""
        return self._counts[: len(self._place_of)]

    def update(self, known: Array) -> None:
        """Count what ``known`` has more than last time."""
        for token in known[self._length :].tolist():
            place = self._place_of.setdefault(token, len(self._place_of))
            if place == len(self._ids):
                more = max(16, place)
                self._ids = np.concatenate((self._ids, np.zeros(more, self._ids.dtype)))
                self._counts = np.concatenate((self._counts, np.zeros(more, np.float32)))
            self._ids[place] = token
            self._counts[place] += 1
        self._length = len(known)


class WordEnds:
    """The last ids of bad words, by the ids before them: a step looks once for each length."""

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        ends: dict[int, dict[tuple[int, ...], set[int]]] = {}
        for word in words:
            ends.setdefault(len(word) - 1, {}).setdefault(word[:-1], set()).add(word[-1])
        self._ends = ends
        self._longest = max(ends, default=0)

    def ends(self, output: Array) -> set[int]:
        """Return the last ids of those words whose other ids are the end of ``output``."""
        last = tuple(output[max(len(output) - self._longest, 0) :].tolist())
        found: set[int] = set()
        for length, ends in self._ends.items():
            if length <= len(last):
                found |= ends.get(last[len(last) - length :], set())
        return found


@define(eq=False)
class Kept:
    """What is kept for one request; each is made when it is first asked for."""

    _counts: TokenCounts | None = None
    _allowed: Array | None = None
    _bias: tuple[Array, Array] | None = None
    _words: WordEnds | None = None

    def counts(self, known: Array, num_prompt: int) -> TokenCounts:
        """Return the counts of ``known`` int32 [n]: prompt, then output."""
        if self._counts is None:
            self._counts = TokenCounts(known, num_prompt)
        self._counts.update(known)
        return self._counts

    def allowed(self, sampling: SamplingParams) -> Array:
        """Return the allowed ids int64 [m], each once."""
        if self._allowed is None:
            self._allowed = np.unique(np.asarray(sampling.allowed_token_ids, dtype=np.int64))
        return self._allowed

    def bias(self, sampling: SamplingParams) -> tuple[Array, Array]:
        """Return the ids int64 [m] with a bias, and what is added to each, float32 [m]."""
        if self._bias is None:
            bias = sampling.logit_bias or {}
            self._bias = (
                np.asarray(list(bias), dtype=np.int64),
                np.asarray(list(bias.values()), dtype=np.float32),
            )
        return self._bias

    def words(self, sampling: SamplingParams) -> WordEnds:
        """Return the ends of the bad words."""
        if self._words is None:
            self._words = WordEnds(sampling.bad_word_ids)
        return self._words

    def forget_counts(self) -> None:
        """Count anew next time: tokens that were counted are no more, or others."""
        self._counts = None
