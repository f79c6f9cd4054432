"""One line of the log for each step, at level debug: what it was, how it ran, where its time went.

Whoever wants it as data implements ``hardpoint_step_finished``.
"""

from __future__ import annotations

import logging

from hardpoint.messages import ModelRunnerOutput, SchedulerOutput

_logger = logging.getLogger("hardpoint.steps")


def trace_step(plan: SchedulerOutput, output: ModelRunnerOutput | None, seconds: float) -> None:
    """Log a step that took ``seconds`` from its sending to its result; ``output`` None: it failed.

    Called by the engine core after each step. Costs nothing while the level is higher.
    """
    if _logger.isEnabledFor(logging.DEBUG):
        _logger.debug("%s", step_line(plan, output, seconds))


def step_line(plan: SchedulerOutput, output: ModelRunnerOutput | None, seconds: float) -> str:
    """Return the line."""
    batch = f"{plan.total_tokens} tokens of {len(plan.num_tokens)} requests"
    parts = [f"step {plan.step_id}: {batch} in {seconds * 1e3:.3f} ms"]
    if output is None:
        parts.append("failed")
    elif (stats := output.graph_stats) is not None:
        parts.append(f"{stats.mode}, {stats.unpadded} tokens padded to {stats.padded}")
    if output is not None and (timings := output.timings) is not None:
        parts.append(
            f"prepare {timings.prepare * 1e3:.3f}, forward {timings.forward * 1e3:.3f}, sample "
            f"{timings.sample * 1e3:.3f} ms"
        )
    return "; ".join(parts)
