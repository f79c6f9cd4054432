"""The next token is a function of the exact history: right blocks give one answer, wrong ones
another (case E2, V7).
"""

from __future__ import annotations

import random

import pytest
from hardpoint.errors import LifecycleError
from hardpoint.messages import CachedRequestData, MessageError, StepTicket

PROMPT = tuple(range(10, 21))


def expected(make_driver, prompt=PROMPT, length=12, **request):
    return make_driver().generate("alone", prompt, length, **request)


def test_the_same_history_gives_the_same_tokens_in_every_worker(make_driver):
    tokens = expected(make_driver)
    assert tokens == expected(make_driver)
    assert tokens != expected(make_driver, prompt=(*PROMPT[:-1], 99))
    assert tokens != expected(make_driver, prompt=(99, *PROMPT[1:]))
    assert len(set(tokens)) > 6
    assert all(0 <= token < 256 for token in tokens)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_chunks_do_not_matter_and_unfinished_prompts_are_not_sampled(make_driver, driver, chunk):
    driver.start("a", PROMPT, count=chunk)
    while (left := len(PROMPT) - driver.requests["a"]["computed"]) > 0:
        assert driver.requests["a"]["output"].tokens == ((),)
        driver.go("a", min(chunk, left))
    while len(driver.output_of("a")) < 12:
        driver.go("a")
    assert driver.output_of("a") == expected(make_driver)


def test_where_the_blocks_lie_does_not_matter(make_driver, driver):
    random.Random(3).shuffle(driver.free)
    assert driver.generate("a", PROMPT, 12) == expected(make_driver)


def test_random_preemption_skipping_and_resumption_change_nothing(make_driver):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed: {seed}")
    source = random.Random(seed)
    driver = make_driver(num_blocks=24)
    prompts = {
        f"r{n}": [source.randrange(256) for _ in range(source.randint(1, 9))] for n in range(3)
    }
    wanted = {name: expected(make_driver, prompt=prompt) for name, prompt in prompts.items()}
    for name, prompt in prompts.items():
        driver.start(name, prompt, count=source.randint(1, len(prompt)))
    preemptions = 0
    for _ in range(400):
        name = source.choice(list(prompts))
        state = driver.requests[name]
        if len(driver.output_of(name)) >= 12:
            continue
        if state["blocks"] and source.random() < 0.15:
            driver.preempt(name)
            preemptions += 1
        elif source.random() < 0.7:  # else it is skipped in this step
            left = len(state["tokens"]) - state["computed"]
            resumed = not state["blocks"]
            output = driver.go(name, source.randint(1, left), resumed=resumed)
            assert output.nan_counts == {}, f"seed {seed}"
    assert preemptions > 3
    for name, tokens in wanted.items():
        assert driver.output_of(name)[:12] == tokens[: len(driver.output_of(name))], f"seed {seed}"
        assert len(driver.output_of(name)) >= 8, f"seed {seed}"


# What must change the answer.


def test_a_stale_block_is_read_as_what_it_is(make_driver, driver):
    driver.start("a", PROMPT)
    first = driver.requests["a"]["blocks"][0]
    driver.start("b", (1, 2, 3, 4, 5), blocks=[first, 60])  # writes into a's block
    for _ in range(6):
        driver.go("a")
    assert driver.output_of("a")[1:] != expected(make_driver)[1:7]


def test_resumed_blocks_replace_the_old_ones(make_driver, driver):
    driver.start("a", PROMPT)
    driver.preempt("a")
    driver.start("b", range(200, 216))
    driver.go("a", len(driver.requests["a"]["tokens"]), resumed=True)
    while len(driver.output_of("a")) < 12:
        driver.go("a")
    assert driver.output_of("a") == expected(make_driver)


def test_resumed_blocks_replace_even_those_that_nobody_took_away(make_driver, driver):
    driver.start("a", PROMPT)
    state = driver.requests["a"]
    state["blocks"], state["computed"] = [], 0
    driver.go("a", len(state["tokens"]), resumed=True)
    while len(driver.output_of("a")) < 12:
        driver.go("a")
    assert driver.output_of("a") == expected(make_driver)
    held = driver.worker.get_model_runner().requests["a"].blocks
    assert held == [state["blocks"]]


def test_a_prefix_hit_on_the_right_blocks_is_as_good_as_computing(make_driver, driver):
    driver.generate("a", PROMPT, 2)
    shared = driver.requests["a"]["blocks"][:2]
    output = driver.start("b", PROMPT, computed=8, blocks=[*shared, 50])
    assert list(output.tokens[0]) == expected(make_driver, length=1)
    assert output.nan_counts == {}


def test_a_prefix_hit_on_wrong_blocks_shows(make_driver, driver):
    driver.generate("a", (99, *PROMPT[1:]), 2)  # equal tokens in block 1, another beginning
    first, second = driver.requests["a"]["blocks"][:2]
    right = expected(make_driver, length=1)
    output = driver.start("b", PROMPT, computed=8, blocks=[first, second, 50])
    assert list(output.tokens[0]) != right
    fresh = driver.start("c", PROMPT, blocks=[51, 52, 53])
    assert list(fresh.tokens[0]) == right
    mixed = driver.start("d", PROMPT, computed=8, blocks=[51, second, 54])
    assert list(mixed.tokens[0]) != right


def test_cells_that_nobody_wrote_are_counted(driver):
    output = driver.start("a", PROMPT, computed=8, blocks=[40, 41, 42])
    assert output.nan_counts == {"a": 8}


def test_blocks_are_zeroed_and_copied_before_the_forward(make_driver, driver):
    driver.generate("a", PROMPT, 1)
    one, two, three = driver.requests["a"]["blocks"]
    copies = ((0, one, 60), (0, two, 61), (0, three, 62))
    copied = driver.start(
        "b", PROMPT, computed=10, blocks=[60, 61, 62], step={"block_copies": copies}
    )
    assert list(copied.tokens[0]) == expected(make_driver, length=1)
    zeroed = driver.go("a", blocks_to_zero=(one,))
    assert zeroed.nan_counts == {"a": 4}


def test_an_unfinished_rollback_is_adopted(make_driver, driver):
    driver.start("a", PROMPT)
    driver.go("a")
    driver.requests["a"]["computed"] -= 3
    driver.go("a", 4)
    while len(driver.output_of("a")) < 12:
        driver.go("a")
    assert driver.output_of("a") == expected(make_driver)


def test_tokens_that_the_driver_dropped_are_trimmed(make_driver, driver):
    driver.start("a", PROMPT)
    driver.go("a")
    del driver.requests["a"]["tokens"][-1]  # the driver never heard of the last step
    driver.requests["a"]["computed"] -= 1
    while len(driver.output_of("a")) < 12:
        driver.go("a")
    assert driver.output_of("a") == expected(make_driver)


def test_a_request_that_comes_back_with_its_outputs(make_driver, driver):
    """``prefill_tokens``: prompt and outputs, for a worker that knows neither."""
    wanted = expected(make_driver)
    known = (*PROMPT, *wanted[:5])
    output = driver.start("a", known, blocks=driver.take(20))
    assert output.tokens == ((wanted[5],),)


# Plans that cannot be.


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda d: d.start("a", PROMPT), "new to the driver but known"),
        (lambda d: d.start("b", PROMPT, blocks=[1]), "do not hold 11 positions"),
        (lambda d: d.start("b", (1,), blocks=[0]), r"block 0 is not in \[1, 64\)"),
        (lambda d: d.start("b", (1,), blocks=[64]), r"block 64 is not in \[1, 64\)"),
        (lambda d: d.start("b", (1, 2), computed=2, count=1), "2 computed of 2 tokens"),
        (lambda d: d.go("a", 5), "positions .* are to be computed, but it has 12 tokens"),
        (lambda d: d.step(preempted=frozenset(["x"])), "request x is not known"),
        (
            lambda d: d.step(
                running=CachedRequestData(
                    req_ids=("a",), new_blocks=(None,), num_computed=(11,), num_output=(7,)
                ),
                num_tokens={"a": 1},
                total_tokens=1,
            ),
            "the driver has 7 output tokens, this worker 1",
        ),
    ],
)
def test_plans_that_contradict_what_is_known_are_refused(driver, act, message):
    driver.start("a", PROMPT)
    with pytest.raises(MessageError, match=message):
        act(driver)


def test_finished_requests_are_forgotten_before_anything_else(driver):
    driver.start("a", PROMPT)
    driver.finish("a")
    assert driver.worker.known_requests() == ()
    driver.start("a", PROMPT)
    driver.start("b", PROMPT, step={"finished": frozenset("a")})
    assert driver.worker.known_requests() == ("b",)
    assert driver.step(finished=frozenset(["never seen"])).tokens == ()


def test_a_ticket_is_good_once(driver):
    ticket = driver.step(defer_sampling=True)
    assert ticket == StepTicket(step_id=1)
    assert driver.worker.sample_tokens(ticket, None).step_id == 1
    with pytest.raises(LifecycleError, match="does not wait"):
        driver.worker.sample_tokens(ticket, None)
