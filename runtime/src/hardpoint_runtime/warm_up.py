"""Steps that belong to nobody: for measuring memory and for warming up.

Their tokens have cache slot -1, so that nothing is written, and read the null block. They touch no
request and no random generator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from hardpoint.errors import CancelledStepError
from hardpoint.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheTensor

from hardpoint_runtime.forward_context import ForwardContext, entered
from hardpoint_runtime.sampling.batch import Draws, SamplingBatch
from hardpoint_runtime.sampling.logprobs import LogprobAsk

if TYPE_CHECKING:
    from hardpoint.kv_cache import KVCacheSpec

    from hardpoint_runtime.attention.builder import AttentionMetadataBuilder
    from hardpoint_runtime.memory.kv_cache import KVCache
    from hardpoint_runtime.model_runner import TorchModelRunner
    from hardpoint_runtime.sampling.sampler import Sampler

PROFILED_LAYERS = 1
"""Layers that a profile runs: they are alike, and what one allocates the next one reuses."""


def single_block_plan(specs: Mapping[str, KVCacheSpec]) -> KVCacheConfig:
    """Return the plan of a KV cache that has the null block only."""
    groups = tuple(KVCacheGroup(layers=(name,), spec=spec) for name, spec in specs.items())
    tensors = tuple(
        KVCacheTensor(num_bytes=spec.page_bytes, layers=(name,)) for name, spec in specs.items()
    )
    return KVCacheConfig(num_blocks=1, groups=groups, tensors=tensors)


def profile(runner: TorchModelRunner) -> None:
    """Run what allocates most: one layer with as many tokens as a step may have, then the logits
    and the sampling of as many requests as may run. Nothing where a program will run the steps,
    which knows what it takes.
    """
    runner.profiled = True
    if runner.graph_plan.any_shape:
        return
    rows = runner.config.scheduler.max_num_seqs or 1
    plan = single_block_plan(runner.get_kv_cache_spec())
    with runner.device.inference():
        dummy_forward(
            runner,
            runner.make_kv_cache(plan),
            runner.make_metadata_builders(plan),
            _largest(runner),
            layers=PROFILED_LAYERS,
        )
        if runner.seat.is_last_stage:
            dummy_sampling(runner, runner.make_sampler(), rows)


def _largest(runner: TorchModelRunner) -> list[int]:
    """Return the lengths of rows that make up the largest step."""
    scheduler = runner.config.scheduler
    tokens = max(scheduler.max_num_batched_tokens or 1, scheduler.max_num_seqs or 1)
    longest = min(tokens, runner.max_model_len)
    return [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0)


def warm_up(runner: TorchModelRunner, kv_cache: KVCache, sampler: Sampler) -> None:
    """Run a decode, a prefill and every way of sampling once, and the largest step if operations
    have scratch memory, which must have grown by then. Whether they have, one layer of that step
    tells, unless a profile has run it. A program has nothing to warm up.
    """
    if runner.graph_plan.any_shape:
        return
    rows = min(runner.config.scheduler.max_num_seqs or 1, 4)
    for lengths in ([1], [1] * rows, [min(16, runner.max_model_len)]):
        dummy_forward(runner, kv_cache, runner.builders, lengths)
    if not runner.profiled:
        dummy_forward(runner, kv_cache, runner.builders, _largest(runner), layers=PROFILED_LAYERS)
    if runner.workspace.num_bytes:
        dummy_forward(runner, kv_cache, runner.builders, _largest(runner))
    if runner.seat.is_last_stage:
        dummy_sampling(runner, sampler, rows)


def dummy_forward(
    runner: TorchModelRunner,
    kv_cache: KVCache,
    builders: Sequence[AttentionMetadataBuilder],
    lengths: Sequence[int],
    *,
    layers: int | None = None,
) -> None:
    """Run the model over rows of ``lengths`` tokens each, through the first ``layers`` only if
    given. Raises CancelledStepError if the driver wants this worker to leave.
    """
    total = sum(lengths)
    starts = [0, *np.cumsum(lengths).tolist()]
    positions = np.concatenate([np.arange(length) for length in lengths])
    attention = {}
    for builder, group in zip(builders, kv_cache.plan.groups, strict=True):
        columns = -(-max(lengths) // builder.block_size)
        metadata = builder.build(
            query_start=starts,
            seq_lens=list(lengths),
            block_table=np.zeros((len(lengths), columns), dtype=np.int32),
            slots=np.full(total, -1, dtype=np.int64),
            positions=positions,
        )
        attention.update(dict.fromkeys(group.layers, metadata))
    context = ForwardContext(
        attention=attention,
        kv_caches=kv_cache.layers,
        layers=runner.layers,
        workspace=runner.workspace,
        extra=runner.context_extra,
        cancelled=_after(layers, runner.context.cancelled),
    )
    token_ids = runner.device.to_device(np.zeros(total, dtype=np.int64), torch.int64)
    model = runner.get_model()
    with entered(context):
        try:
            places = runner.device.to_device(positions, torch.int64)
            if runner.seat.is_first_stage:
                hidden = model(token_ids, places, context)
            else:
                hidden = model(token_ids, places, context, None, _carried(runner, total))
            if runner.seat.is_last_stage:
                model.compute_logits(hidden[-len(lengths) :])
        except CancelledStepError:
            if layers is None or runner.context.cancelled():
                raise


def dummy_sampling(runner: TorchModelRunner, sampler: Sampler, rows: int) -> None:
    """Compute the logits of ``rows`` rows, and sample them in every way that allocates."""
    hidden = torch.zeros(
        (rows, runner.description.hidden_size), dtype=runner.dtype, device=runner.device.device
    )
    logits = runner.get_model().compute_logits(hidden)
    for cut in (False, True):
        draws = Draws(
            rows=np.arange(rows),
            temperature=np.ones(rows, dtype=np.float32),
            keys=np.zeros(rows, dtype=np.int64),
            min_p=np.full(rows, 0.1, dtype=np.float32),
            top_k=np.full(rows, 50) if cut else None,
            top_p=np.full(rows, 0.9, dtype=np.float32) if cut else None,
        )
        asks = tuple(LogprobAsk(row=row, count=1) for row in range(rows))
        sampler.sample(logits, SamplingBatch(num_rows=rows, draws=draws, logprobs=asks))


def _carried(runner: TorchModelRunner, num_tokens: int) -> dict[str, torch.Tensor]:
    """Return zeros in place of what the pipeline stage before would send."""
    return {
        name: torch.zeros(shape, dtype=runner.dtype, device=runner.device.device)
        for name, shape in runner.get_model().carried_shapes(num_tokens).items()
    }


def _after(layers: int | None, cancelled: Callable[[], bool]) -> Callable[[], bool]:
    """Return a ``cancelled`` that also turns true at the question after ``layers`` layers."""
    asked = 0

    def ended() -> bool:
        nonlocal asked
        asked += 1
        return cancelled() or (layers is not None and asked > layers)

    return ended
