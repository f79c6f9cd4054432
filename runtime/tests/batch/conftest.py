"""Requests, plans and tables for the tests of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hardpoint.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec
from hardpoint.messages import CachedRequestData, NewRequestData, SchedulerOutput
from hardpoint.sampling_params import SamplingParams
from hardpoint_runtime.batch.block_table import BlockTables
from hardpoint_runtime.batch.columns import Column
from hardpoint_runtime.batch.requests import Requests, make_columns
from hardpoint_runtime.sampling.columns import SAMPLING_COLUMNS


@pytest.fixture
def make_requests() -> Callable[..., Requests]:
    def make(
        *,
        max_model_len: int = 64,
        capacity: int = 4,
        block_sizes: Sequence[int] = (4,),
        num_blocks: int = 1000,
        more: Sequence[Column] = (),
    ) -> Requests:
        groups = tuple(
            KVCacheGroup(
                layers=(f"layer{index}",),
                spec=KVCacheSpec(
                    block_size=size, num_kv_heads=1, head_size_k=2, head_size_v=2, dtype="float32"
                ),
            )
            for index, size in enumerate(block_sizes)
        )
        plan = KVCacheConfig(num_blocks=num_blocks, groups=groups, tensors=())
        columns = make_columns(max_model_len, capacity, (*SAMPLING_COLUMNS, *more))
        tables = BlockTables(columns, plan, max_model_len=max_model_len)
        return Requests(columns, tables, max_model_len)

    return make


@pytest.fixture
def new_request() -> Callable[..., NewRequestData]:
    def make(req_id="a", prompt=(5, 6, 7), blocks=((1,),), **more) -> NewRequestData:
        more.setdefault("sampling", SamplingParams(temperature=0))
        return NewRequestData(req_id=req_id, prompt=tuple(prompt), block_ids=blocks, **more)

    return make


@pytest.fixture
def step() -> Callable[..., SchedulerOutput]:
    """Build a plan: ``new`` as (request, tokens), ``running`` as rows (id, blocks, computed,
    tokens).
    """

    def make(
        new=(), running=(), *, resumed=(), num_output=(), new_tokens=(), all_tokens=None, **more
    ):
        counts = {request.req_id: count for request, count in new}
        counts |= {row[0]: row[3] for row in running}
        return SchedulerOutput(
            step_id=more.pop("step_id", 1),
            new=tuple(request for request, _ in new),
            running=CachedRequestData(
                req_ids=tuple(row[0] for row in running),
                new_blocks=tuple(row[1] for row in running),
                num_computed=tuple(row[2] for row in running),
                num_output=tuple(num_output),
                resumed=frozenset(resumed),
                new_tokens=new_tokens,
                all_tokens=all_tokens or {},
            ),
            num_tokens=counts,
            total_tokens=sum(counts.values()),
            **more,
        )

    return make


@pytest.fixture
def apply() -> Callable[[Requests, SchedulerOutput], None]:
    """Bring requests up to a plan, as the runner does."""

    def run(requests: Requests, plan: SchedulerOutput) -> None:
        plan.check()
        requests.forget(plan.finished)
        requests.park(plan.preempted)
        requests.check(plan)
        for request in plan.new:
            requests.add(request)
        requests.update(plan)

    return run
