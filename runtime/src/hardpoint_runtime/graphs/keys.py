"""The one builder of graph keys: a batch looks for its graph by what the graph was captured by.

Two builders that drift apart mean that no graph is ever found, and nothing but slowness tells.
"""

from __future__ import annotations

import bisect

from attrs import field, frozen

from hardpoint_runtime.graphs.modes import GraphMode


@frozen(kw_only=True, cache_hash=True)
class BatchKey:
    """The shape of a batch, padded.

    ``num_tokens`` tokens of ``num_reqs`` rows of requests; None where the recorded work sees no
    requests (piecewise). ``uniform``: every row has the same number of tokens. The recorded work
    serves up to ``active_loras`` different adapters.
    """

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    active_loras: int = 0


@frozen(kw_only=True)
class KeyRules:
    """What all keys of one engine follow.

    At most ``max_num_seqs`` requests a batch. In a uniform batch every request has
    ``uniform_query`` tokens: 1 + the number of drafts. ``lora_cases`` are the rising counts of
    adapters that graphs are made for, see :func:`lora_cases`.
    """

    max_num_seqs: int
    uniform_query: int = 1
    lora_cases: tuple[int, ...] = field(default=(0,))

    def is_uniform(self, num_tokens: int, num_reqs: int, max_query: int) -> bool:
        """Whether each of ``num_reqs`` requests has exactly ``uniform_query`` tokens: the longest
        has, and all together have as many as if all had.
        """
        query = self.uniform_query
        return max_query == query and num_tokens == num_reqs * query

    def lora_case(self, active: int) -> int | None:
        """Return the smallest case that serves ``active`` adapters, None if none does."""
        index = bisect.bisect_left(self.lora_cases, active)
        return self.lora_cases[index] if index < len(self.lora_cases) else None


def make_key(
    mode: GraphMode, num_tokens: int, *, uniform: bool, active_loras: int, rules: KeyRules
) -> BatchKey:
    """Return the key of a batch padded to ``num_tokens`` tokens and ``active_loras`` adapters that
    runs in ``mode``. Called for every capture and for every step.

    FULL sees requests: as many as the tokens can belong to. ``uniform`` counts for FULL only.
    Tokens past those of the rows belong to nobody.
    """
    num_reqs = None
    uniform = uniform and mode is GraphMode.FULL
    if mode is GraphMode.FULL:
        query = rules.uniform_query if uniform else 1
        num_reqs = min(num_tokens // query, rules.max_num_seqs)
    return BatchKey(
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        uniform=uniform,
        has_lora=active_loras > 0,
        active_loras=active_loras,
    )


def lora_cases(max_loras: int, *, specialise: bool = True) -> tuple[int, ...]:
    """Return the numbers of adapters to make graphs for: none, the powers of two up to
    ``max_loras``, and ``max_loras`` + 1, as rows without an adapter count as one more.

    Not specialised: one graph serves all counts. Without adapters there is one case, 0.
    """
    if max_loras <= 0:
        return (0,)
    if not specialise:
        return (max_loras + 1,)
    powers = {1 << power for power in range(max_loras.bit_length())}
    return tuple(sorted({0, max_loras + 1} | powers))
