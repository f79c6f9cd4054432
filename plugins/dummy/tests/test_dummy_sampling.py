"""Sampling over the fake logits, drafts, logprobs, masks, adapters and other inputs."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hardpoint.adapters import LoRARequest, PromptAdapterRequest
from hardpoint.errors import InvalidRequestError
from hardpoint.messages import GrammarOutput
from hardpoint.sampling_params import SamplingParams
from hardpoint_dummy.extras import RequestExtra, StepExtra
from hardpoint_dummy.model import FakeModel
from hardpoint_dummy.sampling import Context, choose

PROMPT = (1, 2, 3, 4, 5)
MODEL = FakeModel(1, 256)
STATE = 1000  # best token: 1000 % 256 = 232
BEST = STATE % 256
DRAWS = 1500


def pick(state=STATE, output=(), prompt=PROMPT, mask=None, end_ids=(), **params):
    context = Context(prompt=prompt, output=list(output), end_ids=frozenset(end_ids), mask=mask)
    return choose(MODEL, state, SamplingParams(**params), context)


def test_greedy_takes_the_best_and_the_parameters_that_bear_on_it():
    assert pick(temperature=0) == BEST
    assert pick(temperature=0, logit_bias={BEST: -100}) == BEST + 1
    assert pick(temperature=0, logit_bias={7: 100}) == 7
    assert pick(temperature=0, allowed_token_ids=(3, 5)) == 3
    assert pick(temperature=0, output=[BEST], presence_penalty=1) == BEST + 1
    assert pick(temperature=0, output=[BEST] * 3, frequency_penalty=0.1) == BEST + 1
    assert pick(temperature=0, prompt=[BEST], repetition_penalty=2) == BEST + 1
    assert pick(temperature=0, prompt=[BEST], presence_penalty=2) == BEST
    assert pick(temperature=0, end_ids=[BEST], min_tokens=1) == BEST + 1
    assert pick(temperature=0, end_ids=[BEST], min_tokens=1, output=[0]) == BEST
    assert pick(temperature=0, stop_token_ids=(BEST,), min_tokens=1) == BEST + 1


def test_a_mask_leaves_its_tokens_only():
    mask = bytearray(32)
    mask[9 // 8] |= 1 << (9 % 8)
    assert pick(temperature=0, mask=bytes(mask)) == 9
    assert pick(temperature=1, seed=4, mask=bytes(mask)) == 9


@pytest.mark.parametrize("temperature", [0, 1])
def test_where_nothing_is_left_to_choose_none_is_taken(temperature):
    everything = range(256)
    assert pick(temperature=temperature, stop_token_ids=everything, min_tokens=2) is None
    assert pick(temperature=temperature, allowed_token_ids=(7,), mask=bytes(32)) is None


def histogram(**params):
    counts = Counter(pick(output=[0] * n, seed=5, **params) for n in range(DRAWS))
    return {token: count / DRAWS for token, count in counts.items()}


def exact(temperature=1.0, kept=256):
    weights = [math.exp(-0.25 * index / temperature) for index in range(kept)]
    total = sum(weights)
    return {(BEST + index) % 256: weight / total for index, weight in enumerate(weights)}


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({"temperature": 1.0}, exact()),
        ({"temperature": 0.5}, exact(0.5)),
        ({"temperature": 1.0, "top_k": 3}, exact(kept=3)),
        ({"temperature": 1.0, "top_p": 0.5}, exact(kept=3)),
        ({"temperature": 1.0, "min_p": 0.4}, exact(kept=4)),
    ],
    ids=["plain", "cold", "top_k", "top_p", "min_p"],
)
def test_draws_follow_the_distribution(params, wanted):
    got = histogram(**params)
    assert set(got) <= set(wanted)
    for token, probability in wanted.items():
        assert abs(got.get(token, 0) - probability) < 0.05


def test_a_draw_is_a_function_of_seed_and_position():
    drawn = [pick(output=[0] * n, temperature=1, seed=8) for n in range(30)]
    assert drawn == [pick(output=[0] * n, temperature=1, seed=8) for n in range(30)]
    assert drawn != [pick(output=[0] * n, temperature=1, seed=9) for n in range(30)]
    assert len(set(drawn)) > 3


def test_seeded_requests_do_not_depend_on_batch_or_chunks(make_driver):
    sampling = SamplingParams(temperature=1, seed=42)
    alone = make_driver().generate("a", PROMPT, 10, sampling=sampling)
    busy = make_driver()
    busy.start("other", (9, 9, 9), sampling=SamplingParams(temperature=1, seed=7))
    busy.start("a", PROMPT, count=2, sampling=sampling)
    busy.go("a", 3)
    while len(busy.output_of("a")) < 10:
        busy.go("other")
        busy.go("a")
    assert busy.output_of("a")[:10] == alone


# Logprobs.


def test_logprobs_have_the_chosen_token_first_then_the_best(driver):
    output = driver.start("a", PROMPT, sampling=SamplingParams(temperature=0, seed=1, logprobs=2))
    driver.start("b", PROMPT)
    assert set(driver.requests["b"]["output"].logprobs) == set()
    rows = output.logprobs["a"]
    token = output.tokens[0][0]
    assert rows.ids == ((token, token, (token + 1) % 256),)
    assert rows.ranks == ((1, 1, 2),)
    assert rows.values[0][1] - rows.values[0][2] == pytest.approx(0.25)
    norm = math.log(sum(math.exp(-0.25 * index) for index in range(256)))
    assert rows.values[0][0] == pytest.approx(-norm)


def test_listed_ids_come_after_the_best_each_once(driver):
    token = driver.start("plain", PROMPT).tokens[0][0]
    best = (token, (token + 1) % 256)
    farther = ((token + 4) % 256, (token + 9) % 256)
    sampling = SamplingParams(
        temperature=0, seed=1, logprobs=2, logprob_token_ids=(*farther[::-1], best[1], farther[0])
    )
    rows = driver.start("a", PROMPT, sampling=sampling).logprobs["a"]
    assert rows.ids == ((token, *best, *farther),)
    assert (rows.num_best, rows.ranks) == (2, ((1, 1, 2),))
    assert list(rows.values[0][1:]) == sorted(rows.values[0][1:], reverse=True)


def test_prompt_logprobs_come_with_the_prompts_last_chunk(driver):
    sampling = SamplingParams(temperature=0, seed=1, prompt_logprobs=1)
    first = driver.start("a", PROMPT, count=3, sampling=sampling)
    assert first.prompt_logprobs == {}
    last = driver.go("a", 2)
    rows = last.prompt_logprobs["a"]
    assert [ids[0] for ids in rows.ids] == list(PROMPT[1:])
    assert all(len(ids) == 2 for ids in rows.ids)
    assert driver.go("a").prompt_logprobs == {}


# Drafts.


@pytest.mark.parametrize("temperature", [0, 1])
def test_drafts_change_nothing_but_the_number_of_steps(make_driver, temperature):
    sampling = SamplingParams(temperature=temperature, seed=3)
    wanted = make_driver().generate("a", PROMPT, 30, sampling=sampling)
    driver = make_driver(num_speculative_tokens=3)
    output = driver.start("a", PROMPT, sampling=sampling)
    steps = accepted = 0
    while len(driver.output_of("a")) < 30:
        output = driver.go("a", drafts=output.drafts["a"])
        steps += 1
        accepted += len(output.tokens[0]) - 1
    assert driver.output_of("a")[:30] == wanted
    if temperature == 0:
        assert 0 < accepted < 3 * steps


def test_wrong_drafts_cost_nothing_but_time(make_driver):
    wanted = make_driver().generate("a", PROMPT, 12)
    driver = make_driver()
    driver.start("a", PROMPT)
    while len(driver.output_of("a")) < 12:
        driver.go("a", drafts=(0, 0, 0))
    assert driver.output_of("a")[:12] == wanted


# Grammar, adapters, other inputs.


def test_a_grammar_mask_binds_its_request_only(driver):
    first = driver.start("a", PROMPT)
    assert first.tokens
    driver.start("b", PROMPT)
    mask = bytearray(32)
    mask[0] = 0b10000
    ticket = driver.step(
        running=driver_running("a", "b", computed=5),
        num_tokens={"a": 1, "b": 1},
        total_tokens=2,
        defer_sampling=True,
    )
    grammar = GrammarOutput(req_ids=("b",), masks=((bytes(mask),),))
    output = driver.worker.sample_tokens(ticket, grammar)
    assert output.req_ids == ("a", "b")
    assert output.tokens[1] == (4,)
    assert output.tokens[0] != (4,)


def driver_running(*req_ids, computed):
    from hardpoint.messages import CachedRequestData

    return CachedRequestData(
        req_ids=req_ids,
        new_blocks=(None,) * len(req_ids),
        num_computed=(computed,) * len(req_ids),
        num_output=(1,) * len(req_ids),
    )


def test_adapters_change_the_answer_and_must_be_loaded(make_driver):
    driver = make_driver(max_loras=2)
    lora = LoRARequest(id=3, name="n", path="p", digest="d")
    with pytest.raises(InvalidRequestError, match="LoRA adapter 3 is not loaded"):
        driver.start("a", PROMPT, lora=lora)
    driver.worker.add_lora(lora)
    with_lora = driver.generate("b", PROMPT, 8, lora=lora)
    assert with_lora != driver.generate("c", PROMPT, 8)
    assert with_lora == driver.generate("d", PROMPT, 8, lora=lora)


def test_a_soft_prompt_replaces_the_first_positions(make_driver):
    driver = make_driver(max_prompt_adapters=1)
    adapter = PromptAdapterRequest(id=1, name="n", path="p", num_virtual_tokens=2)
    driver.worker.add_prompt_adapter(adapter)
    soft = driver.generate("a", PROMPT, 6, prompt_adapter=adapter)
    assert soft == driver.generate("b", (7, 7, *PROMPT[2:]), 6, prompt_adapter=adapter)
    assert soft != driver.generate("c", PROMPT, 6)


def test_inputs_that_are_no_tokens_replace_theirs_and_are_encoded_once(driver):
    image = {"dummy": RequestExtra(inputs=((1, b"an image"),))}
    answer = driver.generate("a", PROMPT, 6, extra=image)
    assert answer == driver.generate("b", (1, 99, 3, 4, 5), 6, extra=image)
    assert answer != driver.generate("c", PROMPT, 6)
    runner = driver.worker.get_model_runner()
    assert len(runner.encoded) == 1
    driver.worker.reset_encoder_cache()
    assert runner.encoded == {}


def test_pooling_gives_a_vector_instead_of_tokens(driver):
    output = driver.start("a", PROMPT, extra={"dummy": RequestExtra(pooling=True)})
    assert output.tokens == ((),)
    assert len(output.pooled["a"]) == 4


def test_transfers_are_told_once_some_steps_later(make_driver):
    driver = make_driver(**{"plugins.dummy.transfer_steps": 2})
    asked = StepExtra(send=frozenset("a"), receive_items=frozenset("i"))
    outputs = [driver.step(extra={"dummy": asked}), driver.step(), driver.step(), driver.step()]
    assert [output.kv and output.kv.finished_sending for output in outputs] == [
        None,
        None,
        {"a"},
        None,
    ]
    assert [output.ec and output.ec.finished_receiving for output in outputs] == [
        None, None, {"i"}, None
    ]  # fmt: skip
    assert (outputs[2].kv.rank, outputs[2].kv.step_id) == (0, 3)
