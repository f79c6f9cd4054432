"""The dispatcher: which graph a step replays. One pure function over the plan's one key builder."""

from __future__ import annotations

from collections.abc import Collection

from attrs import frozen

from hardpoint_runtime.graphs.keys import BatchKey, make_key
from hardpoint_runtime.graphs.modes import GraphMode
from hardpoint_runtime.graphs.plan import GraphPlan

ANY_MODE: frozenset[GraphMode] = frozenset(GraphMode)


@frozen(kw_only=True)
class Dispatch:
    """How a step runs: in ``mode``, padded to ``key.num_tokens`` tokens (and ``key.num_reqs`` rows,
    where the key has any). NONE: eager, with the tokens it has.
    """

    mode: GraphMode
    key: BatchKey


class Dispatcher:
    """Chooses among the graphs of ``plan``. Owned by the runner; keeps nothing between calls."""

    def __init__(self, plan: GraphPlan) -> None:
        self.plan = plan

    def dispatch(
        self,
        num_tokens: int,
        num_reqs: int,
        max_query: int,
        active_loras: int = 0,
        *,
        allowed: Collection[GraphMode] = ANY_MODE,
    ) -> Dispatch:
        """Return how a batch runs: ``num_tokens`` tokens of ``num_reqs`` requests, of which the
        longest has ``max_query``, with ``active_loras`` different adapters (rows without one count
        as one more). Pure.

        ``allowed`` are the single modes that something else permits (what other ranks can do, say);
        eager is always permitted.
        """
        plan = self.plan
        uniform = plan.rules.is_uniform(num_tokens, num_reqs, max_query)
        if num_reqs <= plan.rules.max_num_seqs:
            for graph in plan.serving(num_tokens, active_loras, uniform=uniform):
                if graph.mode in allowed:
                    return Dispatch(mode=graph.mode, key=graph.key)
        key = make_key(
            GraphMode.NONE,
            num_tokens,
            uniform=False,
            active_loras=active_loras,
            rules=plan.rules,
        )
        return Dispatch(mode=GraphMode.NONE, key=key)
