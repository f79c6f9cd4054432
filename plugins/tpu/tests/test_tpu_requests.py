"""The worker's copy of the requests against a plain model of dictionaries, and what it refuses."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hardpoint.messages import CachedRequestData, MessageError, NewRequestData, SchedulerOutput
from hardpoint.sampling_params import SamplingParams
from hardpoint_tpu.request_columns import GREEDY, SAMPLING_COLUMNS, Feature, features
from hardpoint_tpu.requests import BlockTableError, Requests

LENGTH, BLOCK, WIDTH, NUM_BLOCKS = 64, 4, 16, 1000


def table(capacity=4) -> Requests:
    return Requests(
        capacity=capacity, max_model_len=LENGTH, block_size=BLOCK, width=WIDTH,
        num_blocks=NUM_BLOCKS,
    )  # fmt: skip


def new(req_id="a", prompt=(5, 6, 7), blocks=(1,), sampling=None, **more) -> NewRequestData:
    return NewRequestData(
        req_id=req_id, prompt=tuple(prompt), block_ids=(tuple(blocks),),
        sampling=sampling or SamplingParams(temperature=0), **more,
    )  # fmt: skip


def plan(*fresh, counts=None, running=None, **more) -> SchedulerOutput:
    counts = counts or {each.req_id: len(each.prompt) - each.num_computed for each in fresh}
    return SchedulerOutput(
        step_id=1, new=fresh, num_tokens=counts, total_tokens=sum(counts.values()),
        running=running or CachedRequestData(), **more,
    )  # fmt: skip


def running(*rows, **more) -> CachedRequestData:
    """Rows of (request, new blocks or None, computed, outputs)."""
    return CachedRequestData(
        req_ids=tuple(row[0] for row in rows),
        new_blocks=tuple(None if row[1] is None else (tuple(row[1]),) for row in rows),
        num_computed=tuple(row[2] for row in rows),
        num_output=tuple(row[3] for row in rows),
        **more,
    )


class Model:
    """What a request must be, in dictionaries."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.prompt: dict[str, list[int]] = {}
        self.output: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}
        self.sampling: dict[str, SamplingParams] = {}
        self.parked: set[str] = set()

    def some_blocks(self, req_id: str, end: int) -> tuple[int, ...]:
        needed = -(-end // BLOCK) - len(self.blocks[req_id])
        return tuple(self.draw.randrange(1, NUM_BLOCKS) for _ in range(max(0, needed)))

    def known(self, req_id: str) -> list[int]:
        return self.prompt[req_id] + self.output[req_id]


def some_sampling(draw: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=draw.choice([0, 0.5, 1.5]), top_k=draw.choice([-1, 0, 7, 2**40]),
        top_p=draw.choice([1, 0.5]), min_p=draw.choice([0, 0.1]), seed=draw.randrange(2**40),
        presence_penalty=draw.choice([0, 1.5]), frequency_penalty=draw.choice([0, -0.5]),
        repetition_penalty=draw.choice([1, 1.3]), min_tokens=draw.choice([0, 3]),
        logit_bias=draw.choice([None, {3: 1.0}]), bad_word_ids=draw.choice([(), ((1, 2),)]),
    )  # fmt: skip


def check(requests: Requests, model: Model) -> None:
    assert set(requests.ids) == set(model.prompt)
    slots = [requests[req_id].slot for req_id in requests.ids]
    assert len(set(slots)) == len(slots)
    for req_id, prompt in model.prompt.items():
        slot = requests[req_id].slot
        assert requests.known(req_id).tolist() == model.known(req_id)
        assert requests.num_prompt(req_id) == len(prompt)
        assert not requests.tokens[slot, len(model.known(req_id)) :].any()
        assert requests.columns["num_computed"][slot] == model.computed[req_id]
        blocks = model.blocks[req_id]
        assert requests.columns["num_blocks"][slot] == len(blocks)
        assert requests.blocks[slot].tolist() == blocks + [0] * (WIDTH - len(blocks))
        assert requests[req_id].preempted == (req_id in model.parked)
        for column in SAMPLING_COLUMNS:
            wanted = np.asarray(column.read(model.sampling[req_id]), column.dtype)
            assert requests.columns[column.name][slot] == wanted
    free = set(range(len(requests.tokens))) - set(slots)
    for slot in free:
        assert not requests.tokens[slot].any()
        assert not requests.blocks[slot].any()
        assert requests.columns["temperature"][slot] == GREEDY


def test_ten_thousand_changes_leave_what_a_plain_model_holds():
    draw = random.Random(7)
    requests, model = table(capacity=2), Model(draw)
    names = iter(range(10_000))
    done = 0
    while done < 10_000:
        finished = {r for r in model.prompt if draw.random() < 0.06}
        for req_id in finished:
            for part in (model.prompt, model.output, model.computed, model.blocks, model.sampling):
                part.pop(req_id)
            model.parked.discard(req_id)
        preempted = {r for r in model.prompt if r not in model.parked and draw.random() < 0.05}
        for req_id in preempted:
            model.blocks[req_id] = []
            model.parked.add(req_id)
        rows, resumed, counts = [], set(), {}
        for req_id in list(model.prompt):
            if draw.random() < 0.4:
                continue
            if req_id in model.parked:
                resumed.add(req_id)
                model.parked.remove(req_id)
                model.computed[req_id] = 0
            counts[req_id] = draw.randint(1, len(model.known(req_id)) - model.computed[req_id])
            blocks = model.some_blocks(req_id, model.computed[req_id] + counts[req_id])
            model.blocks[req_id] += blocks
            rows.append((req_id, blocks or None, model.computed[req_id], len(model.output[req_id])))
        fresh = []
        for _ in range(draw.randint(0, 2) if len(model.prompt) < 9 else 0):
            req_id = f"r{next(names)}"
            model.prompt[req_id] = [draw.randrange(97) for _ in range(draw.randint(1, 20))]
            model.output[req_id], model.blocks[req_id] = [], []
            model.sampling[req_id] = some_sampling(draw)
            model.computed[req_id] = 0
            counts[req_id] = draw.randint(1, len(model.prompt[req_id]))
            model.blocks[req_id] = list(model.some_blocks(req_id, counts[req_id]))
            fresh.append(
                new(req_id, model.prompt[req_id], model.blocks[req_id], model.sampling[req_id])
            )
        requests.apply(
            plan(
                *fresh,
                counts=counts,
                running=running(*rows, resumed=frozenset(resumed)),
                finished=frozenset(finished),
                preempted=frozenset(preempted),
            )
        )
        done += len(finished) + len(preempted) + len(counts)
        check(requests, model)
        for req_id, count in counts.items():
            model.computed[req_id] += count
            complete = model.computed[req_id] == len(model.known(req_id))
            slots = requests.slots([req_id])
            assert requests.due(slots, np.asarray([count])).tolist() == [complete]
            if complete and len(model.known(req_id)) < LENGTH:
                token = draw.randrange(97)
                requests.append_token(req_id, token)
                model.output[req_id].append(token)
            elif complete:
                model.computed[req_id] -= 1
        for req_id in counts:
            requests.columns["num_computed"][requests[req_id].slot] = model.computed[req_id]


def test_tokens_come_from_the_plan_where_it_brings_them():
    requests = table()
    requests.apply(plan(new(prompt=(1, 2), blocks=(1,))))
    requests.append_token("a", 9)
    rows = running(("a", None, 2, 2), new_tokens=((8,),))
    requests.apply(plan(counts={"a": 1}, running=rows))
    assert requests.known("a").tolist() == [1, 2, 9, 8]
    rows = running(("a", None, 2, 2), new_tokens=((5, 6),))
    requests.apply(plan(counts={"a": 1}, running=rows))
    assert requests.known("a").tolist() == [1, 2, 9, 8]  # those that it chose itself
    rows = running(("a", None, 2, 1), all_tokens={"a": (1, 2, 7)})
    requests.apply(plan(counts={"a": 1}, running=rows))
    assert requests.known("a").tolist() == [1, 2, 7]
    assert not requests.tokens[requests["a"].slot, 3:].any()


def test_known_tokens_beyond_what_the_driver_counts_are_dropped():
    requests = table()
    requests.apply(plan(new(prompt=(1, 2), blocks=(1,))))
    requests.append_token("a", 9)
    requests.append_token("a", 8)
    requests.apply(plan(counts={"a": 1}, running=running(("a", None, 2, 1))))
    assert requests.known("a").tolist() == [1, 2, 9]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (lambda: plan(new("a")), "'a' is announced as new, but is known here"),
        (lambda: plan(new("b", prompt=())), "step 1|empty prompt"),
        (lambda: plan(new("b", blocks=(1, NUM_BLOCKS))), f"block {NUM_BLOCKS} is not in"),
        (lambda: plan(new("b", blocks=(0,))), "block 0 is not in"),
        (lambda: plan(new("b", blocks=())), "'b': 3 positions need more than its 0 blocks"),
        (lambda: plan(new("b", blocks=range(1, 18))), "'b': 0 blocks and 17 more, a table has 16"),
        (lambda: plan(new("b", prompt=range(65), blocks=range(1, 17))), "'b' has 65 tokens"),
        (lambda: plan(new("b"), counts={"b": 4}), "4 positions are to be computed, only 3"),
        (lambda: plan(new("b", num_computed=3), counts={"b": 1}), "num_computed 3 is not below"),
        (lambda: plan(new("b", prefill_tokens=(1, 2, 3, 4))), "do not begin with the prompt"),
        (lambda: plan(new("b", sampling=SamplingParams(temperature=1))), "gave it no seed"),
        (lambda: plan(counts={"x": 1}, running=running(("x", None, 0, 0))), "'x' .* unknown here"),
        (lambda: plan(counts={"a": 1}, running=running(("a", None, 3, 2))), "counts 5 tokens"),
        (
            lambda: plan(counts={"a": 2}, running=running(("a", None, 3, 1))),
            "5 positions .* only 4",
        ),
        (lambda: plan(counts={"b": 3}, running=running(("a", None, 3, 1))), "names other requests"),
    ],
)
def test_a_plan_that_contradicts_what_is_known_changes_nothing(bad, words):
    requests = table()
    requests.apply(plan(new("a")))
    requests.append_token("a", 1)
    before = (requests.ids, requests.tokens.copy(), requests.blocks.copy())
    with pytest.raises(MessageError, match=words):
        requests.apply(bad())
    assert requests.ids == before[0]
    assert (requests.tokens == before[1]).all()
    assert (requests.blocks == before[2]).all()


def test_a_preempted_request_runs_again_only_with_new_blocks():
    requests = table()
    requests.apply(plan(new("a")))
    requests.append_token("a", 1)
    requests.apply(plan(new("b", blocks=(2,)), preempted=frozenset({"a"})))
    with pytest.raises(MessageError, match="'a' has lost its blocks"):
        requests.apply(plan(counts={"a": 1}, running=running(("a", None, 3, 1))))
    rows = running(("a", (3,), 0, 1), resumed=frozenset({"a"}))
    requests.apply(plan(counts={"a": 4}, running=rows))
    assert requests.blocks[requests["a"].slot, :2].tolist() == [3, 0]


def test_a_resumed_request_has_its_new_blocks_alone():
    """Also if this worker never heard that it was preempted."""
    requests = table()
    requests.apply(plan(new("a", prompt=range(9), blocks=(1, 2, 3))))
    rows = running(("a", (7,), 0, 0), resumed=frozenset({"a"}))
    requests.apply(plan(counts={"a": 4}, running=rows))
    assert requests.blocks[requests["a"].slot, :4].tolist() == [7, 0, 0, 0]
    assert requests.columns["num_blocks"][requests["a"].slot] == 1


def test_two_block_tables_are_refused():
    request = NewRequestData(
        req_id="a", prompt=(1,), block_ids=((1,), (2,)), sampling=SamplingParams(temperature=0)
    )
    with pytest.raises(BlockTableError, match="2 block tables, there is one group"):
        table().apply(plan(request))


def test_features_say_who_asks_for_what():
    cases = {
        SamplingParams(): 0,
        SamplingParams(logprobs=0): Feature.LOGPROBS,
        SamplingParams(logprob_token_ids=[3]): Feature.LOGPROBS,
        SamplingParams(repetition_penalty=1.1): Feature.PENALTIES,
        SamplingParams(allowed_token_ids=[1]): Feature.ALLOWED,
        SamplingParams(min_tokens=1): Feature.MIN_TOKENS,
        SamplingParams(bad_word_ids=[[1]]): Feature.BAD_WORDS,
    }
    for sampling, wanted in cases.items():
        assert features(sampling) == wanted
    assert features(SamplingParams(logit_bias={1: 2.0})) == Feature.BIAS
