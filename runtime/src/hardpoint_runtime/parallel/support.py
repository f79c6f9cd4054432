"""What of a model can be spread over how many ranks. Used by platforms' checks, in the driver:
imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint.records import Problem

from hardpoint_runtime.parallel.spans import possible_sizes, why_not

if TYPE_CHECKING:
    from hardpoint.checkpoints.description import ModelDescription
    from hardpoint.config import Config


def parallel_problems(config: Config) -> list[Problem]:
    """Return a Problem for each size by which the described model cannot be split."""
    description = config.description
    if description is None:
        return []
    found = _tensor_problems(description, config.parallel.tensor_parallel_size)
    stages = config.parallel.pipeline_parallel_size
    if stages > description.num_layers:
        found.append(
            Problem(
                key="pipeline_parallel_size",
                value=stages,
                message=f"more stages than the model's {description.num_layers} layers.",
                way_out=f"Set it to at most {description.num_layers}.",
            )
        )
    return found


def _tensor_problems(description: ModelDescription, size: int) -> list[Problem]:
    heads, kv_heads = description.num_heads, description.num_kv_heads
    reason = why_not(heads, kv_heads, size)
    for what, count in (
        ("columns of the MLP", description.intermediate_size),
        ("tokens of the vocabulary", description.vocab_size),
    ):
        if reason is None and size > count:
            reason = f"more ranks than the {count} {what}"
    if reason is None:
        return []
    possible = ", ".join(map(str, possible_sizes(heads, kv_heads)))
    return [
        Problem(
            key="tensor_parallel_size",
            value=size,
            message=f"{reason}.",
            way_out=f"Possible with {heads} query and {kv_heads} key-value heads: {possible}.",
        )
    ]
