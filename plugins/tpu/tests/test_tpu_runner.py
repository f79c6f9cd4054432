"""Steps of the tiny model against a dense Llama in numpy, however the work is cut up."""

from __future__ import annotations

import random

import numpy as np
import pytest
from attrs import evolve
from hardpoint.adapters import LoRARequest, PromptAdapterRequest
from hardpoint.errors import CancelledStepError, LifecycleError, UnsupportedError
from hardpoint.messages import GrammarOutput, MessageError, StepTicket
from hardpoint.pooling_params import PoolingParams
from hardpoint.sampling_params import SamplingParams
from hardpoint_tpu.attention import attention

GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def worker(module_workers):
    """One worker for all tests that leave nothing behind."""
    return module_workers()


def prompts(count: int, seed: int = 0, longest: int = 40) -> dict[str, list[int]]:
    draw = random.Random(seed)
    return {
        f"r{index}": [draw.randrange(97) for _ in range(draw.randint(1, longest))]
        for index in range(count)
    }


def seeded(index: int) -> SamplingParams:
    return SamplingParams(temperature=1.2, top_k=40, top_p=0.95, min_p=0.01, seed=40 + index)


def fresh(worker, drive, **more):
    """A driver whose worker will have forgotten everybody before its first step."""
    driver = drive(worker, **more)
    driver.finished = set(worker.get_model_runner().requests.ids)
    return driver


def test_greedy_ids_are_those_of_a_dense_model(worker, drive, dense):
    driver, reference = fresh(worker, drive), dense(worker)
    for req_id, prompt in prompts(4).items():
        driver.add(req_id, prompt, GREEDY)
    found = driver.run(6)
    assert found == {req_id: reference.greedy(prompt, 6) for req_id, prompt in prompts(4).items()}


def alone(worker, drive, params) -> dict[str, list[int]]:
    found = {}
    for req_id, prompt in prompts(4).items():
        driver = fresh(worker, drive)
        driver.add(req_id, prompt, params(int(req_id[1:])))
        found |= driver.run(5)
    return found


@pytest.mark.parametrize("params", [lambda index: GREEDY, seeded], ids=["greedy", "seeded"])
def test_a_request_gives_the_same_however_the_work_is_cut_up(worker, drive, params):
    expected = alone(worker, drive, params)
    for chunk in (None, 1, 7, 16, 64):
        driver = fresh(worker, drive, rng=random.Random(chunk or 0))
        for req_id, prompt in prompts(4).items():
            driver.add(req_id, prompt, params(int(req_id[1:])))
        assert driver.run(5, chunk=chunk) == expected, chunk


@pytest.mark.parametrize("params", [lambda index: GREEDY, seeded], ids=["greedy", "seeded"])
def test_preempted_and_resumed_gives_the_same(worker, drive, params):
    expected = alone(worker, drive, params)
    draw = random.Random(9)
    driver = fresh(worker, drive, rng=draw)
    for req_id, prompt in prompts(4).items():
        driver.add(req_id, prompt, params(int(req_id[1:])))
    preempted = 0
    while busy := [r for r in driver.tokens if len(driver.output(r)) < 5]:
        for req_id in list(driver.known):
            if driver.blocks[req_id] and draw.random() < 0.3:
                driver.preempt(req_id)
                preempted += 1
        some = [r for r in busy if draw.random() < 0.7] or busy
        driver.step({r: draw.randint(1, driver.left(r)) for r in some})
    assert preempted > 3
    assert {r: driver.output(r) for r in driver.tokens} == expected


def test_two_hundred_random_batches_trace_nothing(worker, drive):
    runner = worker.get_model_runner()
    before = dict(runner.programs.stages.traces)
    assert before == runner.programs.stages.shapes
    draw = random.Random(4)
    driver = fresh(worker, drive, rng=draw)
    names = iter(range(10**6))
    shapes = set()
    for _ in range(200):
        while len(driver.tokens) < 4:
            sampling = draw.choice([GREEDY, seeded(draw.randrange(99)), SamplingParams(
                temperature=0, repetition_penalty=1.2, logprobs=3, logit_bias={4: 1.5},
            )])  # fmt: skip
            length = draw.randint(1, 60)
            driver.add(f"n{next(names)}", [draw.randrange(97) for _ in range(length)], sampling)
        busy = [r for r in driver.tokens if draw.random() < 0.8][: draw.choice([1, 4])]
        busy = busy or list(driver.tokens)[:1]
        decode = [r for r in busy if driver.left(r) == 1]
        if decode and draw.random() < 0.6:
            output = driver.step(dict.fromkeys(decode, 1))
        else:
            output = driver.step({r: draw.randint(1, driver.left(r)) for r in busy})
        shapes.add(output.graph_stats.padded)
        for req_id in list(driver.tokens):
            if len(driver.output(req_id)) > 6 or draw.random() < 0.05:
                driver.finish(req_id)
    assert dict(runner.programs.stages.traces) == before
    assert {1, 4, 16, 64} <= shapes


def test_a_cache_full_of_nan_changes_nothing(make_worker, drive, dense):
    import jax

    worker = make_worker()
    cache = worker.get_model_runner().cache
    poisoned = [
        tuple(
            jax.device_put(np.full(cache.shape, np.nan, np.float32), cache.sharding) for _ in "kv"
        )
        for _ in range(2)
    ]
    cache.put(0, poisoned)
    driver, reference = drive(worker), dense(worker)
    for req_id, prompt in prompts(4).items():
        driver.add(req_id, prompt)
    found = driver.run(4, chunk=16)
    assert found == {req_id: reference.greedy(prompt, 4) for req_id, prompt in prompts(4).items()}


def test_the_kernel_gives_the_same_ids(make_worker, drive, dense):
    settings = {"attention": "pallas", "request_buckets": (1,), "token_buckets": (16,)}
    worker = make_worker(settings=settings)
    driver, prompt = drive(worker), list(range(30, 43))
    driver.add("a", prompt)
    assert driver.run(3) == {"a": dense(worker).greedy(prompt, 3)}


def test_zeroed_and_copied_blocks(worker, drive):
    driver = fresh(worker, drive)
    driver.add("a", range(20))
    driver.step({"a": 20})
    runner = worker.get_model_runner()

    def block(index):
        return [np.asarray(array)[index] for layer in runner.cache.take(0, 2) for array in layer]

    source = driver.blocks["a"][0]
    kept = block(source)
    assert all(part.any() for part in kept)
    free = driver.free[:20]
    copies = [(0, source, free[0]), (0, free[0], free[1])]
    copies += [(0, source, each) for each in free[2:20]]
    driver.step({"a": 1}, block_copies=tuple(copies))
    for target in free:
        assert all((a == b).all() for a, b in zip(block(target), kept, strict=True))
    driver.step({"a": 1}, blocks_to_zero=tuple(free))
    for target in free:
        assert not any(part.any() for part in block(target))
    assert all((a == b).all() for a, b in zip(block(source), kept, strict=True))
    with pytest.raises(MessageError, match="group 1"):
        driver.step({"a": 1}, block_copies=((1, source, free[0]),))


def test_log_probabilities_are_each_requests_own(worker, drive, dense):
    driver, reference = fresh(worker, drive), dense(worker)
    asks = {
        "a": {"logprobs": 3}, "b": {"logprobs": None}, "c": {"logprobs": -1},
        "d": {"logprobs": 1, "logprob_token_ids": [50, 60]},
    }  # fmt: skip
    for req_id, ask in asks.items():
        driver.add(req_id, range(10, 30), SamplingParams(temperature=0, **ask))
    driver.run(2)
    for req_id, count in (("a", 3), ("c", 97), ("d", 3)):
        for index, row in enumerate(driver.logprobs[req_id]):
            known = driver.tokens[req_id][: 20 + index]
            logits = reference.logits(known)[-1]
            values = logits - np.log(np.exp(logits).sum())
            assert len(row.ids[0]) == 1 + count
            assert row.ids[0][0] == driver.output(req_id)[index] == values.argmax()
            ranked = row.ids[0][: row.num_best + 1]
            assert row.ranks == (tuple(int((values >= values[i]).sum()) for i in ranked),)
            np.testing.assert_allclose(row.values[0], values[list(row.ids[0])], atol=1e-4)
            assert list(row.values[0][1:]) == sorted(row.values[0][1:], reverse=True)
    assert {50, 60} <= set(driver.logprobs["d"][0].ids[0][1:])
    assert driver.logprobs["b"] == []
    turned = fresh(worker, drive)
    turned.add(
        "d", range(10, 30), SamplingParams(temperature=0, logprobs=1, logprob_token_ids=[60, 50])
    )
    turned.run(2)
    assert turned.logprobs["d"] == driver.logprobs["d"]


def mask(*allowed: int) -> bytes:
    bits = np.zeros(128, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def test_a_deferred_step_waits_for_its_grammar(worker, drive):
    driver = fresh(worker, drive)
    for req_id in ("a", "b"):
        driver.add(req_id, range(5))
    plan = driver.plan({"a": 5, "b": 5}, defer_sampling=True)
    ticket = worker.execute_model(plan)
    assert ticket == StepTicket(step_id=plan.step_id)
    with pytest.raises(LifecycleError, match=r"waits for sample_tokens \(requests \['a', 'b'\]\)"):
        worker.execute_model(driver.plan({"a": 1}))
    with pytest.raises(LifecycleError, match="does not wait"):
        worker.sample_tokens(StepTicket(step_id=-5), None)
    grammar = GrammarOutput(req_ids=("b",), masks=((mask(33),),))
    output = worker.sample_tokens(ticket, grammar)
    assert dict(zip(output.req_ids, output.tokens, strict=True))["b"] == (33,)
    with pytest.raises(LifecycleError, match="waiting: none"):
        worker.sample_tokens(ticket, None)


def test_parameters_reach_the_choice(worker, drive):
    cases = {
        "a": SamplingParams(temperature=0, logit_bias={7: 100.0}),
        "b": SamplingParams(temperature=0, allowed_token_ids=[9]),
        "c": SamplingParams(temperature=0, logit_bias={7: 100.0}, bad_word_ids=[[7]]),
        "d": GREEDY,
    }
    driver = fresh(worker, drive)
    for req_id, sampling in cases.items():
        driver.add(req_id, range(6), sampling)
    found = driver.run(3)
    assert found["a"] == [7, 7, 7]
    assert found["b"] == [9, 9, 9]
    assert found["c"] == found["d"]


def test_a_looping_prompt_is_penalised_by_the_formula(worker, drive, dense):
    sampling = SamplingParams(
        temperature=0, repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1
    )
    prompt = [5, 6, 7] * 6
    driver, reference = fresh(worker, drive), dense(worker)
    driver.add("a", prompt, sampling)
    found = driver.run(8)["a"]
    tokens = list(prompt)
    for _ in range(8):
        logits = reference.logits(tokens)[-1].copy()
        for token in set(tokens):
            x = logits[token]
            logits[token] = x / 1.3 if x > 0 else x * 1.3
        for token in set(tokens[len(prompt) :]):
            logits[token] -= 0.2 * tokens[len(prompt) :].count(token) + 0.1
        tokens.append(int(logits.argmax()))
    assert found == tokens[len(prompt) :]


def test_a_row_of_nan_is_counted_and_alone(make_worker, drive, dense):
    worker = make_worker()
    runner = worker.get_model_runner()
    driver = drive(worker)
    driver.add("good", range(20))
    driver.add("bad", range(20, 40))
    driver.step({"good": 20, "bad": 20})
    import jax

    cache = runner.cache
    layers = []
    for pair in cache.take(0, 2):
        broken = []
        for array in pair:
            host = np.array(array)
            host[driver.blocks["bad"][0]] = np.nan
            broken.append(jax.device_put(host, cache.sharding))
        layers.append(tuple(broken))
    cache.put(0, layers)
    output = driver.step({"good": 1, "bad": 1})
    assert output.nan_counts == {"bad": 97}
    assert output.tokens[output.req_ids.index("good")] == (dense(worker).greedy(range(20), 2)[1],)


def test_a_step_without_requests_has_no_tokens(worker, drive):
    driver = fresh(worker, drive)
    driver.add("a", range(3))
    driver.step({"a": 3})
    driver.finish("a")
    output = driver.step({})
    assert (output.req_ids, output.tokens) == ((), ())
    assert worker.get_model_runner().requests.ids == ()


def test_drafts_are_refused(worker, drive):
    driver = fresh(worker, drive)
    driver.add("a", range(3))
    with pytest.raises(UnsupportedError, match="speculative decoding"):
        driver.step({"a": 3}, drafts={"a": (1,)})


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("pooling", PoolingParams("last")),
        ("lora", LoRARequest(id=1, name="a", path="/nowhere")),
        ("prompt_adapter", PromptAdapterRequest(id=1, name="a", path="/nowhere")),
    ],
)
def test_what_it_does_not_serve_is_refused_and_leaves_nothing(worker, drive, name, asked):
    driver = fresh(worker, drive)
    driver.add("a", range(3))
    plan = driver.plan({"a": 3})
    plan = evolve(plan, new=(evolve(plan.new[0], **{name: asked}),))
    with pytest.raises(UnsupportedError, match=rf"{name} \(request a\)"):
        worker.execute_model(plan)
    assert "a" not in worker.get_model_runner().requests.ids


def test_a_step_ends_when_it_is_given_up(make_worker, drive):
    given_up = []
    worker = make_worker(cancelled=lambda: bool(given_up))
    driver = drive(worker)
    driver.add("a", range(3))
    given_up.append(True)
    with pytest.raises(CancelledStepError, match="step"):
        driver.step({"a": 3})


def test_bfloat16_is_near_float32(make_worker, drive, dense):
    settings = {"request_buckets": (1,), "token_buckets": (64,)}
    worker = make_worker(settings=settings, dtype="bfloat16")
    runner = worker.get_model_runner()
    assert {array.dtype.name for array in runner.model.params.arrays()} == {"bfloat16"}
    assert runner.cache.dtype.name == "bfloat16"
    driver = drive(worker)
    driver.add("a", range(30), SamplingParams(temperature=0, logprobs=-1))
    driver.run(1)
    (row,) = driver.logprobs["a"]
    logits = dense(worker).logits(range(30))[-1]
    values = logits - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(row.values[0], values[list(row.ids[0])], atol=5e-2)


def test_attention_is_what_the_settings_say(worker):
    assert worker.get_model_runner().programs._attention() is attention
