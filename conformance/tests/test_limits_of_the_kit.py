"""The kit's model and its steps are made from what the platform says of itself."""

from __future__ import annotations

import pytest
from hardpoint.records import Limits
from hardpoint_conformance import ModelRunnerSuite, in_worker
from hardpoint_conformance.generation import Bench
from hardpoint_conformance.kit_model import ModelShape
from hardpoint_conformance.subject import plans


@pytest.mark.parametrize(
    ("offered", "size"), [((), 8), ((64, 128), 64), ((128, 64), 64), ((4, 16), 16), ((4,), 4)]
)
def test_the_model_has_a_head_size_that_the_platform_offers(offered, size):
    limits = Limits(
        dtypes=("float32",), default_dtype="float32", block_sizes=(16,), head_sizes=offered
    )
    shape = ModelShape.within(limits)
    assert shape.head_size == size
    assert shape.hidden_size == size * shape.num_heads


RESERVED, MOST_SEQS, MOST_TOKENS, MULTIPLE = 3, 2, 16, 8
NARROW = {
    "plugins.dummy.block_sizes": [8],
    "plugins.dummy.reserved_blocks": RESERVED,
    "plugins.dummy.max_num_seqs": MOST_SEQS,
    "plugins.dummy.max_num_batched_tokens": MOST_TOKENS,
    "plugins.dummy.chunk_multiple": MULTIPLE,
    "plugins.dummy.max_prefills_per_step": 1,
    "plugins.dummy.mixed_batches": False,
}
TESTS = (
    "test_a_prompt_in_chunks_is_the_prompt",
    "test_a_full_batch_is_its_requests",
    "test_the_output_names_the_scheduled_requests_each_once",
    "test_random_histories_are_the_oracles",
)


@pytest.fixture
def steps():
    """Every plan of those tests, on a platform whose limits are narrow, and the cache's blocks."""
    suite = ModelRunnerSuite.of("dummy", settings=NARROW)
    try:
        executor = Bench.of(suite.subject).executor
        executor.collective_rpc(in_worker.keep_plans)
        for test in TESTS:
            getattr(suite(), test)()
        (kept,) = executor.collective_rpc(in_worker.kept_plans)
        yield kept, plans(executor)[0].num_blocks
    finally:
        suite.subject.remove()


def test_every_step_is_within_the_limits(steps):
    kept, num_blocks = steps
    lengths, chunks = {}, 0
    for plan in kept:
        lengths |= {new.req_id: len(new.prompt) for new in plan.new}
        computed = {new.req_id: new.num_computed for new in plan.new}
        computed |= dict(zip(plan.running.req_ids, plan.running.num_computed, strict=True))
        ends = {each: computed[each] + count for each, count in plan.num_tokens.items()}
        prompts = [each for each in ends if computed[each] < lengths[each]]
        unfinished = [each for each in prompts if ends[each] < lengths[each]]
        assert plan.total_tokens <= MOST_TOKENS
        assert len(ends) <= MOST_SEQS
        assert len(prompts) <= 1
        assert not prompts or len(ends) == 1
        assert all(plan.num_tokens[each] % MULTIPLE == 0 for each in unfinished)
        given = [block for new in plan.new for block in new.block_ids[0]]
        given += [block for row in plan.running.new_blocks if row for block in row[0]]
        assert all(RESERVED <= block < num_blocks for block in given)
        chunks += len(unfinished)
    assert len(kept) > 50
    assert chunks > 5
