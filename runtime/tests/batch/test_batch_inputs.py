from __future__ import annotations

import random

import pytest
from hardpoint_runtime.batch.inputs import batch_order, build_inputs


def three(make_requests, new_request):
    """Requests with 0, 3 and 10 computed tokens."""
    requests = make_requests(max_model_len=64, block_sizes=(4,))
    for name, computed, total, first in (("a", 0, 2, 1), ("b", 3, 8, 10), ("c", 10, 13, 20)):
        blocks = (tuple(range(first, first - (-total // 4))),)
        prompt = tuple(first * 100 + at for at in range(total))
        requests.add(new_request(req_id=name, prompt=prompt, blocks=blocks, num_computed=computed))
    return requests


def test_the_documented_example(make_requests, new_request):
    inputs = build_inputs(three(make_requests, new_request), ["a", "b", "c"], [2, 5, 3])
    assert inputs.row_of_token.tolist() == [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
    assert inputs.positions.tolist() == [0, 1, 3, 4, 5, 6, 7, 10, 11, 12]
    assert inputs.query_start.tolist() == [0, 2, 7, 10]
    assert inputs.logits_rows.tolist() == [1, 6, 9]
    assert inputs.seq_lens.tolist() == [2, 8, 13]
    assert inputs.token_ids.tolist() == [
        100, 101, 1003, 1004, 1005, 1006, 1007, 2010, 2011, 2012,
    ]  # fmt: skip
    assert (inputs.max_query, inputs.max_seq) == (5, 13)
    assert inputs.sampled_ids == ("a", "b", "c")
    assert inputs.cache_slots[0].tolist() == [
        4, 5, 43, 44, 45, 46, 47, 90, 91, 92,
    ]  # fmt: skip
    assert inputs.block_tables[0].tolist() == [[1, 0, 0, 0], [10, 11, 0, 0], [20, 21, 22, 23]]


def test_unfinished_prompts_have_no_row_to_sample(make_requests, new_request):
    inputs = build_inputs(three(make_requests, new_request), ["a", "b", "c"], [1, 5, 2])
    assert inputs.sampled_ids == ("b",)
    assert inputs.logits_rows.tolist() == [5]


def test_padding_is_inert(make_requests, new_request):
    requests = three(make_requests, new_request)
    plain = build_inputs(requests, ["c", "a"], [3, 2])
    padded = build_inputs(requests, ["c", "a"], [3, 2], padded_reqs=4, padded_tokens=8)
    assert (padded.num_reqs, padded.num_tokens) == (4, 8)
    assert padded.seq_lens.tolist() == [13, 2, 0, 0]
    assert padded.query_start.tolist() == [0, 3, 5, 5, 5]
    assert padded.cache_slots[0].tolist() == [*plain.cache_slots[0].tolist(), -1, -1, -1]
    assert padded.block_tables[0].tolist()[2:] == [[0] * 4] * 2
    assert padded.token_ids.tolist() == [*plain.token_ids.tolist(), 0, 0, 0]
    assert padded.positions.tolist() == [*plain.positions.tolist(), 0, 0, 0]
    assert padded.logits_rows.tolist() == plain.logits_rows.tolist()
    assert padded.sampled_ids == plain.sampled_ids == ("c", "a")


def test_single_tokens_come_first_and_the_rest_as_planned():
    assert batch_order({"p": 7, "d": 1, "q": 2, "e": 1}) == ("d", "e", "p", "q")


@pytest.mark.parametrize("seed", range(5))
def test_against_brute_force(make_requests, new_request, seed):
    rng = random.Random(seed)
    requests = make_requests(max_model_len=64, block_sizes=(4, 8), num_blocks=10_000)
    known = {}
    for name in "abcdefg":
        prompt = tuple(rng.randrange(1000) for _ in range(rng.randrange(1, 60)))
        blocks = tuple(
            tuple(rng.randrange(1, 10_000) for _ in range(-(-len(prompt) // size)))
            for size in (4, 8)
        )
        computed = rng.randrange(len(prompt))
        requests.add(new_request(req_id=name, prompt=prompt, blocks=blocks, num_computed=computed))
        known[name] = (prompt, blocks, computed)
    order = rng.sample("abcdefg", 5)
    counts = [rng.randrange(1, len(known[name][0]) - known[name][2] + 1) for name in order]
    inputs = build_inputs(requests, order, counts)
    ids, positions, slots, starts, rows = [], [], ([], []), [0], []
    for name, count in zip(order, counts, strict=True):
        prompt, blocks, computed = known[name]
        for at in range(computed, computed + count):
            ids.append(prompt[at])
            positions.append(at)
            for group, size in enumerate((4, 8)):
                slots[group].append(blocks[group][at // size] * size + at % size)
        starts.append(len(ids))
        if computed + count == len(prompt):
            rows.append(len(ids) - 1)
    assert inputs.token_ids.tolist() == ids
    assert inputs.positions.tolist() == positions
    assert inputs.query_start.tolist() == starts
    assert [each.tolist() for each in inputs.cache_slots] == list(slots)
    assert inputs.logits_rows.tolist() == rows
