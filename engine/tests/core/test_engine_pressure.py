"""A thousand requests through a whole engine with few KV blocks: given up, preempted, of unlike
priority and kind; each ends right.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

NUM_REQUESTS = 1000
USABLE, BLOCK_SIZE = 64, 4
LONGEST = USABLE * BLOCK_SIZE
KINDS = (
    {},
    {"logprobs": 2},
    {"temperature": 1.0, "top_k": 20, "logprobs": 1},
    {"temperature": 0.7, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"prompt_logprobs": 1, "logit_bias": {3: 5.0}},
    {"allowed_token_ids": range(0, 256, 3), "min_tokens": 1, "stop_token_ids": [9, 12]},
)


def requests(source):
    """Name -> (prompt, parameters); some share a beginning."""
    made = {}
    for number in range(NUM_REQUESTS):
        length = source.choice([1, 3, 9, 20, 60, 150])
        shared = (5,) * min(length, source.choice([0, 0, 8, 16]))
        prompt = (*shared, *(source.randrange(256) for _ in range(length - len(shared))))
        wanted = source.choice([1, 3, 8, 25])
        made[f"r{number}"] = (prompt, {"max_tokens": wanted, "seed": number} | source.choice(KINDS))
    return made


def scores(engine):
    """Request -> its rows of log-probabilities, those of its prompt first."""
    rows = {}
    for output in engine.outputs:
        for found in (output.prompt_logprobs, output.logprobs):
            if found is not None:
                kept = rows.setdefault(output.req_id, [])
                kept += zip(found.ids, found.values, found.ranks, strict=True)
    return rows


@pytest.mark.parametrize(
    "ahead",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["one_step", "two_steps"],
)
def test_everybody_gets_what_is_theirs_and_nothing_is_left(engine, ahead):
    source = random.Random(20261130 + ahead)
    wanted = requests(source)
    alone = engine(num_kv_blocks=4000, max_num_seqs=64, max_model_len=LONGEST)
    for name, (prompt, params) in wanted.items():
        alone.add(name, prompt, **params)
    alone.run()

    one = engine(
        num_kv_blocks=USABLE + 1, block_size=BLOCK_SIZE, max_model_len=LONGEST, max_num_seqs=24,
        max_num_batched_tokens=96, async_scheduling=ahead,
    )  # fmt: skip
    core, left, given_up, most_waiting = one.core, list(wanted), set(), 0
    while left or core.has_unfinished():
        for name in left[: source.choice([0, 1, 2, 8])]:
            prompt, params = wanted[left.pop(0)]
            one.add(name, prompt, priority=source.choice([-1, 0, 0, 0, 1]), **params)
        live = [name for name in one.tokens if name not in one.ends]
        if live and source.random() < 0.08:
            name = source.choice(live)
            if core.abort(name):
                given_up.add(name)
        if core.has_unfinished():
            one.step()
        most_waiting = max(most_waiting, len(core.scheduler.roster.waiting))

    assert most_waiting > 100, "there was pressure"
    assert core.metrics.preemptions > 50
    assert len(given_up) > 20
    assert one.ends.keys() == wanted.keys()
    right = scores(alone)
    for name, rows in scores(one).items():
        assert rows == right[name][: len(rows)]
        assert name in given_up or len(rows) == len(right[name])
    for name, end in one.ends.items():
        if name in given_up:
            assert end.finish_reason == "abort"
            assert one.tokens[name] == alone.tokens[name][: len(one.tokens[name])]
        else:
            assert end.finish_reason == alone.ends[name].finish_reason
            assert one.tokens[name] == alone.tokens[name]
    assert core.metrics.finished == Counter(end.finish_reason for end in one.ends.values())
    assert core.metrics.requests == NUM_REQUESTS
    pool = core.scheduler.blocks.pool
    assert (pool.num_free, len(pool.references)) == (USABLE, 0)
    assert not len(core.scheduler.roster)
    one.add("last", (1,))
    one.run()
    assert core.executor.collective_rpc(known_requests) == [["last"]], "it has not heard of its end"


def known_requests(worker):
    return [*worker.get_model_runner().requests]
