"""Blocks for every rank, from whatever the ranks report."""

from __future__ import annotations

import pytest
from hardpoint.errors import ConfigError, MemoryBudgetError, UnsupportedError
from hardpoint.kv_cache import KVCacheKind, KVCacheSpec
from hardpoint_engine.scheduling.kv_planning import fit_model_len, plan_kv_cache
from hypothesis import assume, given, settings
from hypothesis import strategies as st


def spec(heads=1, **changes):
    values = {
        "block_size": 16,
        "num_kv_heads": heads,
        "head_size_k": 4,
        "head_size_v": 4,
        "dtype": "float32",
    }
    return KVCacheSpec(**(values | changes))


PAGE = spec().page_bytes  # 512


def layers(count, first=0, heads=1, **changes):
    return {f"layers.{first + i}": spec(heads, **changes) for i in range(count)}


@settings(deadline=None, derandomize=True)
@given(
    stages=st.lists(
        st.tuples(st.integers(0, 6), st.lists(st.integers(1, 3), min_size=1, max_size=3)),
        min_size=1,
        max_size=4,
    ),
    data=st.data(),
    reserved=st.integers(1, 3),
)
def test_all_ranks_end_with_the_same_number_and_none_exceeds_its_memory(stages, data, reserved):
    specs, first = [], 0
    for count, heads_of_ranks in stages:
        specs += [layers(count, first, heads) for heads in heads_of_ranks]
        first += count
    assume(first)
    available = [data.draw(st.integers(-PAGE, 200 * PAGE)) for _ in specs]
    dearest = min(
        room // sum(s.page_bytes for s in rank.values())
        for rank, room in zip(specs, available, strict=True)
        if rank
    )
    if dearest <= reserved:
        with pytest.raises(MemoryBudgetError, match=f"at least {reserved + 1} blocks"):
            plan_kv_cache(specs, available, reserved=reserved)
        return
    plan = plan_kv_cache(specs, available, reserved=reserved)
    assert {config.num_blocks for config in plan.configs} == {plan.num_blocks} == {dearest}
    for rank, config in enumerate(plan.configs):
        total = sum(tensor.num_bytes for tensor in config.tensors)
        assert total == plan.num_blocks * sum(s.page_bytes for s in specs[rank].values())
        assert total <= max(0, available[rank])
        assert {name for tensor in config.tensors for name in tensor.layers} == set(specs[rank])
        assert [group.spec.follows for group in config.groups] == [KVCacheKind.FULL]
        for group in config.groups:
            assert all(specs[rank][name] == group.spec for name in group.layers)


def test_the_fewest_blocks_are_not_where_the_least_memory_is():
    plan = plan_kv_cache([layers(2), layers(20, 2)], [100 * PAGE, 200 * PAGE])
    assert plan.num_blocks == 10
    assert plan.capacity == 9 * 16


def test_layers_with_other_windows_have_a_group_of_their_own_on_every_rank():
    sliding = {"kind": "sliding", "follows": KVCacheKind.SLIDING, "window": 64}
    first = {"a": spec(2), "b": spec(2, **sliding)}
    second = {"c": spec(1), "d": spec(1)}  # a later stage without windows, fewer heads
    plan = plan_kv_cache([first, second], [1 << 20, 1 << 20])
    assert plan.num_groups == 2
    assert [group.layers for group in plan.configs[0].groups] == [("a",), ("b",)]
    assert [group.layers for group in plan.configs[1].groups] == [("c", "d"), ()]


def test_ranks_of_one_layer_may_differ_in_heads_but_layers_of_one_rank_may_not():
    plan = plan_kv_cache([layers(2, heads=2), layers(2, heads=1)], [1 << 20] * 2)
    assert plan.num_groups == 1
    odd = {"a": spec(1), "b": spec(2)}
    assert plan_kv_cache([odd], [1 << 20]).num_groups == 2


def test_what_cannot_be_planned_says_why():
    with pytest.raises(UnsupportedError, match="'recurrent'"):
        plan_kv_cache([{"a": spec(kind="m", follows=KVCacheKind.RECURRENT)}], [1 << 20])
    with pytest.raises(UnsupportedError, match=r"different block sizes.*\[16, 32\]"):
        plan_kv_cache([{"a": spec(), "b": spec(block_size=32)}], [1 << 20])
    with pytest.raises(UnsupportedError, match="no worker reports a layer"):
        plan_kv_cache([{}, {}], [1 << 20, 1 << 20])
    with pytest.raises(ConfigError, match="disagree on the KV cache of layer 'a'"):
        plan_kv_cache([{"a": spec()}, {"a": spec(block_size=32)}], [1 << 20] * 2)


def test_an_explicit_number_is_taken_or_refused():
    assert plan_kv_cache([layers(1)], None, num_blocks=7).num_blocks == 7
    with pytest.raises(MemoryBudgetError, match="at least 3"):
        plan_kv_cache([layers(1)], None, num_blocks=2, reserved=2)


def test_too_little_memory_is_told_with_every_ranks_figures():
    with pytest.raises(MemoryBudgetError) as caught:
        plan_kv_cache([layers(1), layers(2, 1)], [-5, 3 * PAGE])
    assert f"rank 0: -5 bytes available, {PAGE} bytes a block" in str(caught.value)
    assert f"rank 1: {3 * PAGE} bytes available, {2 * PAGE} bytes a block" in str(caught.value)


def test_the_longest_request():
    plan = plan_kv_cache([layers(1)], None, num_blocks=9)  # 128 tokens
    assert fit_model_len(plan, None, 4096) == 128
    assert fit_model_len(plan, None, 100) == 100
    assert fit_model_len(plan, None, 4096, longest_prompt=50) == 50
    assert fit_model_len(plan, 128, 4096) == 128
    with pytest.raises(ConfigError, match=r"max_model_len = 101.*context is 100"):
        fit_model_len(plan, 101, 100)
    with pytest.raises(MemoryBudgetError) as caught:
        fit_model_len(plan, 129, 4096)
    for figure in ("max_model_len = 129", "9 KV blocks of 16", "has 8", "128 tokens", f"{PAGE} b"):
        assert figure in str(caught.value)
