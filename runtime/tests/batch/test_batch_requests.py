from __future__ import annotations

import random

import numpy as np
import pytest
from hardpoint.messages import MessageError
from hardpoint.sampling_params import SamplingParams
from hardpoint_runtime.batch.block_table import BlockTableError
from hardpoint_runtime.batch.columns import Column
from hardpoint_runtime.sampling.columns import features


def test_a_request_from_first_step_to_last(make_requests, new_request, step, apply):
    requests = make_requests()
    apply(requests, step([(new_request(prompt=(5, 6, 7), blocks=((1,),)), 3)]))
    requests.append_token("a", 40)
    requests.append_token("a", 41)
    assert requests.tokens("a").tolist() == [5, 6, 7, 40, 41]

    apply(requests, step(preempted=frozenset({"a"})))
    table = requests.block_tables.tables[0]
    assert requests["a"].preempted
    assert table.row(requests.slot_of("a")).tolist() == []
    assert requests.tokens("a").tolist() == [5, 6, 7, 40, 41]

    apply(requests, step(running=[("a", ((8, 9),), 0, 5)], resumed={"a"}))
    assert table.row(requests.slot_of("a")).tolist() == [8, 9]  # replaced, not appended
    assert not requests["a"].preempted
    apply(requests, step(finished=frozenset({"a"})))
    assert "a" not in requests
    assert requests.columns.taken == set()


def test_blocks_of_a_resumed_request_are_replaced(make_requests, new_request, step, apply):
    """Also where no plan had said that it was preempted."""
    requests = make_requests()
    apply(requests, step([(new_request(), 3)]))
    apply(requests, step(running=[("a", ((9,),), 0, 3)], resumed={"a"}))
    assert requests.block_tables.tables[0].row(0).tolist() == [9]


def test_blocks_of_a_running_request_are_appended(make_requests, new_request, step, apply):
    requests = make_requests()
    apply(requests, step([(new_request(), 3)]))
    requests.append_token("a", 40)
    apply(requests, step(running=[("a", None, 3, 1)]))
    requests.append_token("a", 41)
    apply(requests, step(running=[("a", ((6,),), 4, 1)]))
    assert requests.block_tables.tables[0].row(0).tolist() == [1, 6]
    assert requests.columns["num_computed"][0] == 4


def test_finished_ids_may_be_unknown(make_requests, step, apply):
    apply(make_requests(), step(finished=frozenset({"never", "seen"})))


def test_prefill_tokens_are_prompt_and_output(make_requests, new_request, step, apply):
    requests = make_requests()
    request = new_request(prompt=(5, 6), prefill_tokens=(5, 6, 90, 91), blocks=((1,),))
    apply(requests, step([(request, 4)]))
    assert requests.tokens("a").tolist() == [5, 6, 90, 91]
    assert requests.columns["num_prompt"][0] == 2


def test_the_scheduler_s_count_trims_what_it_did_not_take(make_requests, new_request, step, apply):
    requests = make_requests()
    apply(requests, step([(new_request(), 3)]))
    requests.append_token("a", 40)
    requests.append_token("a", 41)
    apply(requests, step(running=[("a", None, 3, 1)], num_output=[1]))
    assert requests.tokens("a").tolist() == [5, 6, 7, 40]
    assert requests.columns["tokens"][0, 4:].any() == False  # noqa: E712


def test_stale_tokens_are_replaced(make_requests, new_request, step, apply):
    requests = make_requests()
    apply(requests, step([(new_request(), 3)]))
    plan = step(
        running=[("a", ((2, 3),), 0, 5)], resumed={"a"}, all_tokens={"a": (5, 6, 7, 70, 71)}
    )
    apply(requests, plan)
    assert requests.tokens("a").tolist() == [5, 6, 7, 70, 71]


@pytest.mark.parametrize("sampled", [[], [40], [40, 41], [40, 41, 42]])
def test_told_tokens_reach_those_who_did_not_sample(
    make_requests, new_request, step, apply, sampled
):
    """An earlier stage takes them, a stage that sampled some of them takes the rest."""
    requests = make_requests()
    apply(requests, step([(new_request(), 3)]))
    for token in sampled:
        requests.append_token("a", token)
    plan = step(running=[("a", None, 3, 1)], num_output=[2], new_tokens=((40, 41),))
    apply(requests, plan)
    assert requests.tokens("a").tolist() == [5, 6, 7, 40, 41]


def state_of(requests):
    held = {
        column.name: requests.columns[column.name].copy() for column in requests.columns.declared
    }
    return requests.ids, requests.columns.taken, held


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"new": {"req_id": "a"}}, "'a' is announced as new, but is known"),
        ({"new": {"prompt": ()}}, "'b' has an empty prompt"),
        ({"new": {"prompt": range(65)}}, "'b' has 65 tokens, the longest here is 64"),
        ({"new": {"num_computed": 3}}, "'b': num_computed 3 is not below its 3 tokens"),
        ({"new": {"prefill_tokens": (9, 9, 9, 9)}}, "'b': prefill_tokens do not begin with"),
        ({"new": {"count": 4}}, "'b': 4 positions are to be computed, only 3 tokens are known"),
        ({"new": {"prompt": range(1, 9)}}, "'b': 8 positions need more than its 1 blocks of 4"),
        ({"new": {"sampling": SamplingParams()}}, "'b' draws, but the driver gave it no seed"),
        ({"running": ("ghost", None, 3, 1)}, "'ghost' is announced as running, but is unknown"),
        ({"running": ("a", None, 3, 2)}, "'a': 5 positions are to be computed, only 4"),
        ({"running": ("a", None, 3, 1), "num_output": [2]}, "'a': the plan counts 5 tokens"),
        ({"running": ("a", None, 3, 1), "num_output": [3], "new_tokens": ((8,),)},
         "'a': the plan counts 6 tokens, only 5 are known"),
        ({"running": ("parked", None, 2, 1)}, r"'parked' has lost its blocks; .* in resumed"),
    ],
)  # fmt: skip
def test_a_plan_that_is_refused_changes_nothing(
    make_requests, new_request, step, apply, wrong, text
):
    requests = make_requests()
    parked = new_request(req_id="parked", blocks=((3,),))
    apply(requests, step([(new_request(), 3), (parked, 3)]))
    requests.append_token("a", 40)
    apply(requests, step(preempted=frozenset({"parked"})))
    before = state_of(requests)
    new, running = [], [("a", None, 3, 1)]
    if "new" in wrong:
        request = {"req_id": "b", "blocks": ((4,),), **wrong["new"]}
        count = request.pop("count", max(1, len(tuple(request.get("prompt", (1, 2, 3))))))
        new = [(new_request(**request), count)]
        running = [] if request["req_id"] == "a" else running
    else:
        running = [wrong["running"]]
    told = {key: wrong[key] for key in ("num_output", "new_tokens") if key in wrong}
    with pytest.raises(MessageError, match=text):
        apply(requests, step(new, running, **told))
    after = state_of(requests)
    assert after[:2] == before[:2]
    for name, values in before[2].items():
        np.testing.assert_array_equal(after[2][name], values)


def test_too_many_blocks_are_an_error_with_the_request(make_requests, new_request, step, apply):
    requests = make_requests(max_model_len=64, block_sizes=(4,))
    apply(requests, step([(new_request(), 3)]))
    requests.append_token("a", 1)
    with pytest.raises(BlockTableError, match="request 'a': 40 more blocks"):
        apply(requests, step(running=[("a", (tuple(range(1, 41)),), 3, 1)]))


def test_a_shorter_longest_length_refuses_longer_requests(make_requests, new_request, step, apply):
    requests = make_requests()
    apply(requests, step([(new_request(prompt=range(1, 9), blocks=((1, 2),)), 8)]))
    with pytest.raises(MessageError, match="cannot become 4: request 'a' has 8 tokens"):
        requests.resize(4)
    requests.resize(200)
    assert requests.tokens("a").tolist() == list(range(1, 9))
    assert requests.block_tables.tables[0].width == 64
    long = new_request(req_id="long", prompt=range(150), blocks=(tuple(range(10, 48)),))
    apply(requests, step([(long, 150)]))
    assert requests.tokens("long").tolist() == list(range(150))


PLUGIN_COLUMN = Column(
    name="acme.mode",
    dtype="int16",
    shape=(2,),
    default=(-1, -1),
    pad=0,
    read=lambda new: new.extra.get("acme"),
)


def random_sampling(rng):
    greedy = rng.random() < 0.3
    return SamplingParams(
        temperature=0 if greedy else rng.choice([0.5, 1.0, 1.5]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, -1, 5]),
        min_p=rng.choice([0.0, 0.25]),
        presence_penalty=rng.choice([0.0, 1.5]),
        frequency_penalty=rng.choice([0.0, -0.5]),
        repetition_penalty=rng.choice([1.0, 1.25]),
        seed=rng.randrange(1 << 64),
        max_tokens=None,
        min_tokens=rng.choice([0, 3]),
        logprobs=rng.choice([None, 2]),
        allowed_token_ids=rng.choice([None, (1, 2)]),
        logit_bias=rng.choice([None, {3: 4.0}]),
    )


def expected_columns(request, tokens, computed, blocks):
    sampling, drawn = request.sampling, not request.sampling.greedy
    return {
        "num_prompt": len(request.prompt),
        "num_tokens": len(tokens),
        "num_computed": computed,
        "num_blocks.0": len(blocks),
        "temperature": sampling.temperature if drawn else 0,
        "top_k": max(sampling.top_k, 0) if drawn else 0,
        "top_p": np.float32(sampling.top_p if drawn else 1),
        "min_p": sampling.min_p if drawn else 0,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "features": features(sampling),
    }


def check(requests, model):
    assert set(requests.ids) == set(model)
    slots = {requests.slot_of(req_id) for req_id in model}
    assert len(slots) == len(model)
    assert requests.columns.taken == slots
    for req_id, known in model.items():
        slot = requests.slot_of(req_id)
        assert slot == known["slot"]  # for life
        request = known["request"]
        assert requests.tokens(req_id).tolist() == known["tokens"]
        assert requests.block_tables.tables[0].row(slot).tolist() == known["blocks"]
        state = requests[req_id]
        assert (state.sampling, state.seed) == (request.sampling, request.sampling.seed)
        assert state.extra is request.extra
        wanted = expected_columns(request, known["tokens"], known["computed"], known["blocks"])
        found = {name: requests.columns[name][slot] for name in wanted}
        assert found == wanted
        assert requests.columns["acme.mode"][slot].tolist() == list(request.extra["acme"])


def check_unused(requests):
    unused = [s for s in range(requests.columns.capacity) if s not in requests.columns.taken]
    for column in requests.columns.declared:
        held = requests.columns[column.name][unused]
        np.testing.assert_array_equal(held, np.broadcast_to(column.default, held.shape))


def test_ten_thousand_random_operations_against_a_plain_dictionary(
    make_requests, new_request, step, apply
):
    rng = random.Random(20260101)
    requests = make_requests(max_model_len=48, capacity=4, num_blocks=5000, more=(PLUGIN_COLUMN,))
    model: dict[str, dict] = {}
    for number in range(10_000):
        running = [r for r, known in model.items() if not known["preempted"]]
        parked = [r for r, known in model.items() if known["preempted"]]
        what = rng.choice(["add", "decode", "decode", "token", "preempt", "resume", "finish"])
        if what == "add" and len(model) < 12:
            prompt = tuple(rng.randrange(1000) for _ in range(rng.randrange(1, 12)))
            blocks = tuple(rng.randrange(1, 5000) for _ in range(-(-len(prompt) // 4)))
            request = new_request(
                req_id=f"r{number}",
                prompt=prompt,
                blocks=(blocks,),
                sampling=random_sampling(rng),
                extra={"acme": (rng.randrange(100), number)},
            )
            lowest = min(set(range(len(model) + 1)) - {known["slot"] for known in model.values()})
            apply(requests, step([(request, len(prompt))], step_id=number))
            model[request.req_id] = {
                "slot": lowest, "request": request, "tokens": list(prompt), "computed": 0,
                "blocks": list(blocks), "preempted": False,
            }  # fmt: skip
        elif what == "token" and running:
            known = model[req_id := rng.choice(running)]
            if len(known["tokens"]) < 48:
                known["tokens"].append(rng.randrange(1000))
                requests.append_token(req_id, known["tokens"][-1])
        elif what in ("decode", "resume") and (pick := running if what == "decode" else parked):
            known = model[req_id := rng.choice(pick)]
            needed = -(-len(known["tokens"]) // 4)
            have = 0 if known["preempted"] else len(known["blocks"])
            fresh = [rng.randrange(1, 5000) for _ in range(needed - have)]
            computed = 0 if known["preempted"] else len(known["tokens"]) - 1
            row = (
                req_id,
                (tuple(fresh),) if fresh else None,
                computed,
                len(known["tokens"]) - computed,
            )
            resumed = {req_id} if known["preempted"] else ()
            apply(requests, step(running=[row], resumed=resumed, step_id=number))
            known["blocks"] = fresh if resumed else known["blocks"] + fresh
            known["computed"], known["preempted"] = computed, False
        elif what == "preempt" and running:
            known = model[req_id := rng.choice(running)]
            apply(requests, step(preempted=frozenset({req_id}), step_id=number))
            known["blocks"], known["preempted"] = [], True
        elif what == "finish" and model:
            req_id = rng.choice(sorted(model))
            apply(requests, step(finished=frozenset({req_id, "unknown"}), step_id=number))
            del model[req_id]
        check(requests, model)
        if number % 20 == 0:
            check_unused(requests)
    check_unused(requests)
    assert requests.columns.capacity == 16  # grew from 4 for the 12 that were alive at once


def test_a_request_that_a_column_cannot_read_takes_no_slot(make_requests, new_request):
    requests = make_requests()
    wrong = Column(name="x", dtype="int32", default=0, pad=0, read=lambda new: 1 << 40)
    requests.columns.declare(wrong)
    with pytest.raises(OverflowError):
        requests.add(new_request("a"))
    assert not requests.columns.taken
    assert "a" not in requests
