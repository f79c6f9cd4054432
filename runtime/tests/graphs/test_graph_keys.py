"""The one key builder and the cases of adapters."""

from __future__ import annotations

import pytest
from hardpoint_runtime.graphs.keys import BatchKey, KeyRules, lora_cases, make_key
from hardpoint_runtime.graphs.modes import GraphMode

FULL, PIECEWISE, NONE = GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.NONE


def compositions(total: int, parts: int):
    """Every way to share ``total`` tokens among ``parts`` requests, one at least for each."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


@pytest.mark.parametrize("query", [1, 2, 3])
def test_uniform_is_every_request_having_exactly_the_query(query):
    rules = KeyRules(max_num_seqs=4, uniform_query=query)
    for total in range(1, 13):
        for parts in range(1, min(total, 4) + 1):
            for lengths in compositions(total, parts):
                expected = set(lengths) == {query}
                assert rules.is_uniform(total, parts, max(lengths)) is expected


def test_keys():
    rules = KeyRules(max_num_seqs=3, uniform_query=2)
    key = make_key(FULL, 4, uniform=True, active_loras=0, rules=rules)
    assert key == BatchKey(num_tokens=4, num_reqs=2, uniform=True)
    key = make_key(FULL, 8, uniform=True, active_loras=0, rules=rules)
    assert key == BatchKey(num_tokens=8, num_reqs=3, uniform=True)
    key = make_key(FULL, 2, uniform=False, active_loras=2, rules=rules)
    assert key == BatchKey(num_tokens=2, num_reqs=2, has_lora=True, active_loras=2)
    for mode in (PIECEWISE, NONE):
        key = make_key(mode, 8, uniform=True, active_loras=1, rules=rules)
        assert key == BatchKey(num_tokens=8, has_lora=True, active_loras=1)


def test_adapter_cases():
    assert lora_cases(0) == (0,)
    assert lora_cases(1) == (0, 1, 2)
    assert lora_cases(4) == (0, 1, 2, 4, 5)
    assert lora_cases(5) == (0, 1, 2, 4, 6)
    assert lora_cases(7) == (0, 1, 2, 4, 8)
    assert lora_cases(4, specialise=False) == (5,)
    assert lora_cases(0, specialise=False) == (0,)


@pytest.mark.parametrize("specialise", [True, False])
def test_a_count_of_adapters_is_rounded_up_to_a_case(specialise):
    for most in range(10):
        cases = lora_cases(most, specialise=specialise)
        rules = KeyRules(max_num_seqs=1, lora_cases=cases)
        largest = most + 1 if most else 0
        for active in range(largest + 1):
            assert rules.lora_case(active) == min(case for case in cases if case >= active)
        assert rules.lora_case(largest + 1) is None
