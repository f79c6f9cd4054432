"""How the steps of one runner were dispatched: what each reports, and what the worker counts."""

from __future__ import annotations

import logging
from collections import Counter

from hardpoint.messages import GraphStats

from hardpoint_runtime.graphs.dispatcher import Dispatch
from hardpoint_runtime.graphs.modes import GraphMode
from hardpoint_runtime.graphs.plan import GraphPlan

_logger = logging.getLogger("hardpoint.graphs")


class GraphCounts:
    """Counts steps by mode. Owned by the runner of ``plan``, which asks :meth:`step` for what its
    output says.

    ``steps`` counts by mode. ``unknown`` counts, by tokens, the batches that ran eagerly although
    the plan has graphs: each shape is logged once.
    """

    def __init__(self, plan: GraphPlan) -> None:
        self.plan = plan
        self.steps: Counter[GraphMode] = Counter()
        self.unknown: Counter[int] = Counter()

    def step(self, dispatch: Dispatch, num_tokens: int) -> GraphStats | None:
        """Count one step of ``num_tokens`` tokens; return what to report, None without graphs."""
        self.steps[dispatch.mode] += 1
        if not self.plan.graphs:
            return None
        if dispatch.mode is GraphMode.NONE:
            self._count_unknown(num_tokens)
        return GraphStats(
            unpadded=num_tokens, padded=dispatch.key.num_tokens, mode=dispatch.mode.name
        )

    def _count_unknown(self, num_tokens: int) -> None:
        if num_tokens not in self.unknown:
            _logger.info(
                "a step of %d tokens runs eagerly: the plan of graphs (mode %s, up to %d tokens) "
                "has none for it", num_tokens, self.plan.mode.value, self.plan.largest,
            )  # fmt: skip
        self.unknown[num_tokens] += 1
