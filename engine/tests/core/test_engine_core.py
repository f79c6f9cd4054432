"""The core over a whole engine: dummy platform, uni executor, real threads and signals."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from hardpoint.adapters import LoRARequest
from hardpoint.errors import (
    ExecutorFailedError,
    InvalidRequestError,
    RemoteError,
    UnsupportedError,
)
from hardpoint.sleep import SleepStateError
from hardpoint_engine.scheduling.results import NoNumbersError

PROMPTS = {f"r{n}": tuple((n * 31 + i) % 250 for i in range(3 + 5 * n)) for n in range(5)}


def answers(engine, **options):
    """Each prompt alone, nothing cached."""
    one = engine(enable_prefix_caching=False, max_num_seqs=1)
    return {req_id: one.ask(prompt, **options) for req_id, prompt in PROMPTS.items()}


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "seeded"]
)
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"prefill_chunk_size": 1},
        {"prefill_chunk_size": 7},
        {"prefill_chunk_size": 64},
        {"num_kv_blocks": 9, "block_size": 8},
        {"enable_prefix_caching": False},
        {"num_kv_blocks": 9, "block_size": 8, "enable_prefix_caching": False},
        {"dummy": {"mixed_batches": False, "max_prefills_per_step": 1}},
        {"dummy": {"chunk_multiple": 8}, "prefill_chunk_size": 8},
        {"dummy": {"reserved_blocks": 3}},
    ],
    ids=str,
)
def test_the_same_tokens_however_they_are_computed(engine, keys, sampling):
    expected = answers(engine, max_tokens=24, **sampling)
    one = engine(**keys)
    for req_id, prompt in PROMPTS.items():
        one.add(req_id, prompt, max_tokens=24, **sampling)
    one.run()
    assert one.tokens == expected
    for req_id, prompt in PROMPTS.items():
        assert one.ask(prompt, max_tokens=24, **sampling) == expected[req_id]
    if "num_kv_blocks" in keys:
        assert one.core.metrics.preemptions > 0
    elif keys.get("enable_prefix_caching", True):
        assert one.core.metrics.cached_tokens > 0


def test_requests_join_while_others_run(engine):
    expected = answers(engine)
    one = engine()
    for req_id, prompt in PROMPTS.items():
        one.add(req_id, prompt)
        one.step()
    one.run()
    assert one.tokens == expected


MALFORMED = [
    ({"prompt": ()}, "prompt", "empty"),
    ({"prompt": (1, 256)}, "prompt", "256"),
    ({"prompt": (1, -1)}, "prompt", "-1"),
    ({"prompt": (1, "2")}, "prompt", "'2'"),
    ({"prompt": (1, True)}, "prompt", "True"),
    ({"prompt": (1, 2.0)}, "prompt", "2.0"),
    ({"prompt": (1,) * 256}, "prompt", "context is 256"),
    ({"stop_token_ids": (256,)}, "stop_token_ids", "256"),
    ({"logprobs": 257}, "logprobs", "257"),
    ({"logprobs": 21}, "logprobs", "asks for 21 .* max_logprobs is 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "asks for 256 .* max_logprobs is 20"),
    ({"logprob_token_ids": range(21)}, "logprob_token_ids", "asks for 21"),
    ({"logit_bias": [1]}, "logit_bias", "must map"),
    ({"logit_bias": {"1": 1.0}}, "logit_bias", "whole numbers .* not '1'"),
    ({"logit_bias": {1: "x"}}, "logit_bias", "number to token 1, not 'x'"),
    ({"logit_bias": {1: float("nan")}}, "logit_bias", "number to token 1, not nan"),
    ({"logit_bias": {256: 1.0}}, "logit_bias", "256"),
    ({"bad_words": ("x",)}, "bad_words", "bad_words"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "give the grammar"),
    ({"n": 2, "temperature": 1}, "n", "one sequence"),
    ({"req_id": "good"}, "req_id", "taken"),
    ({"req_id": ""}, "req_id", "non-empty"),
]


@pytest.mark.parametrize(
    ("wrong", "field", "message"), MALFORMED, ids=[case[2] for case in MALFORMED]
)
def test_a_malformed_request_fails_alone(engine, wrong, field, message):
    one = engine()
    expected = one.ask((1, 2, 3))
    one.add("good", (1, 2, 3))
    one.step()
    steps = len(one.calls("execute_model"))
    with pytest.raises(InvalidRequestError, match=message) as caught:
        one.add(**{"req_id": "bad", "prompt": (1,), **wrong})
    assert caught.value.field == field
    assert len(one.calls("execute_model")) == steps
    one.run()
    assert one.tokens["good"] == expected
    assert one.core.metrics.requests == 2


def test_any_number_of_logprobs_may_be_allowed(engine):
    one = engine(max_logprobs=-1)
    one.add("a", (1, 2), max_tokens=1, logprobs=-1, prompt_logprobs=-1)
    one.run()
    (output,) = one.outputs
    assert len(output.logprobs.ids[0]) == len(output.prompt_logprobs.ids[0]) == 257


def test_a_temperature_that_is_raised_is_said_once(engine, caplog):
    one = engine()
    one.ask((1,), temperature=0.003)
    (said,) = [each for each in caplog.records if "temperature" in each.message]
    assert said.levelname == "WARNING"
    assert "0.003 is raised to 0.01" in said.message
    for fine in (0, 1e-6, 0.01, 1):
        one.ask((1,), temperature=fine)
    assert len([each for each in caplog.records if "temperature" in each.message]) == 1


@pytest.mark.parametrize(
    ("wrong", "capability"),
    [({"lora": LoRARequest(id=1, name="a", path="b")}, "LoRA adapters")],
)
def test_what_the_engine_cannot_do_yet_says_so(engine, wrong, capability):
    one = engine()
    with pytest.raises(UnsupportedError, match=rf"hardpoint-engine.*{capability}.*not yet"):
        one.add("bad", (1,), **wrong)
    assert one.ask((1,))


class TestFailedStep:
    def test_ends_its_requests_once_with_the_workers_error(self, engine):
        one = engine(dummy={"fail_at": "step:3"}, max_num_seqs=2)
        for req_id in ("a", "b", "c"):
            one.add(req_id, PROMPTS["r1"])
        while not one.ends:
            assert one.core.ready == bool(one.tokens["a"])
            one.step()
        assert len(one.calls("execute_model")) == 3
        assert not one.core.ready
        assert one.core.alive
        for req_id in ("a", "b"):
            error = one.ends[req_id].error
            assert one.ends[req_id].finish_reason == "error"
            assert isinstance(error, RemoteError)
            assert error.rank == 0
            assert type(error.__cause__).__name__ == "DummyFault"
            assert len(one.tokens[req_id]) == 2
        one.run()
        assert one.core.ready
        assert one.core.metrics.failed_steps == 1
        assert one.core.metrics.finished == {"error": 2, "length": 1}
        one.add("a", PROMPTS["r1"])
        del one.ends["a"]
        one.run()
        assert one.tokens["a"] == one.tokens["c"]

    def test_of_a_resumed_request_loses_no_block(self, engine):
        expected = answers(engine, max_tokens=24)
        for nth in range(1, 60, 7):
            one = engine(num_kv_blocks=9, block_size=8, dummy={"fail_at": f"step:{nth}"})
            for req_id, prompt in PROMPTS.items():
                one.add(req_id, prompt, max_tokens=24)
            one.run()
            assert one.core.metrics.failed_steps == 1, "the fault fired"
            for req_id, tokens in one.tokens.items():
                assert tokens == expected[req_id][: len(tokens)]
                assert one.ends[req_id].finish_reason in ("error", "length")
            assert one.core.metrics.gauges.blocks_held == 0
            one.core.shutdown()


class TestAbort:
    def test_in_any_state(self, engine):
        one = engine(max_num_seqs=1)
        assert not one.core.abort("nobody")
        one.add("running", (1, 2), max_tokens=50)
        one.add("waiting", (1, 2))
        one.step()
        for req_id in ("running", "waiting"):
            assert one.core.abort(req_id)
            assert not one.core.abort(req_id)
        assert one.core.has_unfinished()
        one.run()
        assert {end.finish_reason for end in one.ends.values()} == {"abort"}
        assert not one.core.abort("running")
        assert one.core.metrics.gauges.blocks_held == 0
        one.add("running", (3,))
        one.ends.clear()
        one.run()
        assert one.ends["running"].finish_reason == "length"

    def test_from_another_thread_while_a_step_runs(self, engine):
        one = engine(dummy={"step_seconds": 0.2})
        one.add("a", (1, 2), max_tokens=3)
        one.add("b", (1, 2), max_tokens=3)
        stepping = threading.Thread(target=one.step)
        stepping.start()
        while one.core.executor.check_health()[0].busy_since is None:
            assert stepping.is_alive()
        assert one.core.abort("a")
        stepping.join()
        assert one.tokens["a"] == ()
        assert len(one.tokens["b"]) == 1
        one.run()
        assert one.ends["a"].finish_reason == "abort"

    def test_with_the_fronts_own_reason(self, engine):
        one = engine()
        one.add("a", (1, 2), max_tokens=50)
        one.step()
        one.core.abort("a", "stop", "END")
        one.run()
        assert (one.ends["a"].finish_reason, one.ends["a"].stop_reason) == ("stop", "END")
        assert one.ends["a"].metrics.num_generation_tokens == 1


@pytest.fixture
def interruptible():
    """Ctrl-C raises, also where the tests' own process was started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_step_loses_and_repeats_nothing(engine):
    expected = answers(engine, max_tokens=3)
    one = engine(dummy={"step_seconds": 0.4})
    for req_id, prompt in PROMPTS.items():
        one.add(req_id, prompt, max_tokens=3)
    here = threading.get_ident()

    def interrupt():
        while one.core.executor.check_health()[0].busy_since is None:
            time.sleep(0.001)
        signal.pthread_kill(here, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        one.step()
    interrupting.join()
    one.step()
    assert one.core.metrics.steps == len(one.calls("execute_model")) == 1
    one.run()
    assert one.tokens == expected


def test_a_request_that_the_model_has_no_numbers_for_ends_alone(engine):
    """Lost cells stand for a model that gives NaN; the cache does not offer them again."""
    one = engine()
    prompt, other = tuple(range(1, 10)), tuple(range(20, 29))
    expected, neighbour = one.ask(prompt, max_tokens=8), one.ask(other, max_tokens=12)
    one.add("a", prompt, max_tokens=50)
    one.add("b", other, max_tokens=12)
    one.step()
    (lost,) = (each.blocks for each in one.core.scheduler.roster.running if each.req_id == "a")
    one.core.executor.collective_rpc(lose, args=(lost[0],))
    one.run()
    assert one.ends["a"].finish_reason == "error"
    assert isinstance(one.ends["a"].error, NoNumbersError)
    assert "no numbers for request a (4 are NaN" in str(one.ends["a"].error)
    assert one.ends["b"].finish_reason == "length"
    assert one.tokens["b"] == neighbour
    assert one.ask(prompt, max_tokens=8) == expected


def lose(worker, block):
    worker.get_model_runner().cache.zero(block)


class TestTheEnd:
    def test_shutdown_aborts_what_is_left(self, engine):
        one = engine()
        one.add("a", (1, 2), max_tokens=50)
        one.step()
        one.core.shutdown()
        one.core.shutdown()
        one.run()
        assert one.ends["a"].finish_reason == "abort"
        assert not one.core.alive
        assert not one.core.ready
        assert not one.core.healthy
        for action in (one.core.step, one.core.check_health, lambda: one.add("b", (1,))):
            with pytest.raises(ExecutorFailedError, match="shut down"):
                action()
        assert not one.core.abort("a")

    def test_shutdown_while_a_step_runs_ends_the_waiting_thread(self, engine):
        one = engine(dummy={"step_seconds": 30})
        one.add("a", (1, 2))
        stepping = threading.Thread(target=one.step)
        stepping.start()
        while one.core.executor.check_health()[0].busy_since is None:
            assert stepping.is_alive()
        one.core.shutdown()
        stepping.join(60)
        assert not stepping.is_alive()
        assert one.ends["a"].finish_reason == "abort"

    def test_a_failed_executor_ends_every_request_once(self, engine):
        one = engine(max_num_seqs=1)
        for req_id in ("a", "b"):
            one.add(req_id, (1, 2), max_tokens=50)
        one.step()
        first = OSError("the device fell off")
        one.core.executor.fail(first)
        one.run()
        assert {req_id: end.error for req_id, end in one.ends.items()} == {"a": first, "b": first}
        with pytest.raises(ExecutorFailedError, match="fell off") as caught:
            one.core.step()
        assert caught.value.__cause__ is first
        assert not one.core.healthy


def test_ready_is_not_alive_and_not_healthy(engine):
    one = engine()
    assert one.core.alive
    assert one.core.healthy
    assert not one.core.ready
    one.ask((1,))
    assert one.core.ready
    one.core.executor.generation += 1
    assert not one.core.ready
    one.core.executor.generation -= 1


class TestMemory:
    PROMPT = tuple(range(1, 30))

    def cached(self, one):
        one.ask(self.PROMPT, max_tokens=1)
        return one.outputs[-1].metrics.num_cached_tokens

    def test_after_a_reset_nothing_is_found(self, engine):
        one = engine()
        assert [self.cached(one), self.cached(one)] == [0, 28]
        one.core.reset_prefix_cache()
        assert len(one.calls("reset_prefix_cache")) == 1
        assert [self.cached(one), self.cached(one)] == [0, 28]

    @pytest.mark.parametrize("by", ["core", "executor", "other means"])
    def test_after_new_weights_nothing_old_is_found(self, engine, by):
        one = engine()
        old = one.ask(self.PROMPT)
        assert self.cached(one) == 28
        if by == "other means":
            one.core.weights_changed()
        else:
            getattr(one.core, by, one.core).reload_weights("elsewhere")
        assert self.cached(one) == 0
        assert self.cached(one) == 28
        assert (one.ask(self.PROMPT) == old) == (by == "other means")

    def test_unless_they_are_said_to_be_the_same(self, engine):
        one = engine()
        old = one.ask(self.PROMPT)
        one.core.reload_weights(keep_cache=True)
        assert self.cached(one) == 28
        assert one.ask(self.PROMPT) == old

    def test_asleep_no_step_runs_and_no_request_is_harmed(self, engine):
        one = engine()
        expected = one.ask(self.PROMPT, max_tokens=20)
        one.add("a", self.PROMPT, max_tokens=20)
        one.step()
        one.core.executor.sleep(1)
        with pytest.raises(SleepStateError, match="wake_up"):
            one.step()
        one.core.executor.wake_up(["weights"])
        with pytest.raises(SleepStateError, match="kv_cache"):
            one.step()
        one.core.executor.wake_up()
        one.run()
        assert one.tokens["a"] == expected
        assert one.ends["a"].metrics.num_preemptions == 1


class TestSeeds:
    def draw(self, one):
        for n in range(3):
            one.add(f"d{n}", (1, 2, 3), temperature=1.0, max_tokens=12)
        one.run()
        return [one.tokens[f"d{n}"] for n in range(3)]

    def test_the_engines_seed_decides(self, engine):
        first, second = self.draw(engine(seed=5)), self.draw(engine(seed=5))
        assert first == second
        assert len(set(first)) == 3, "each request draws its own"
        assert self.draw(engine(seed=6))[0] == first[1]

    def test_unset_it_is_fresh(self, engine):
        assert self.draw(engine()) != self.draw(engine())

    def test_the_requests_own_comes_first(self, engine):
        one = engine(seed=5)
        tokens = [one.ask((1, 2), temperature=1.0, seed=9, max_tokens=12) for _ in range(2)]
        assert tokens[0] == tokens[1]


def test_totals_add_up(engine):
    one = engine(num_kv_blocks=9, block_size=8)
    for req_id, prompt in PROMPTS.items():
        one.add(req_id, prompt, max_tokens=24)
    one.run()
    metrics = one.core.metrics
    assert metrics.requests == sum(metrics.finished.values()) == 5
    assert metrics.generated_tokens == sum(map(len, one.tokens.values())) == 120
    assert metrics.computed_tokens == metrics.step_tokens.total
    assert metrics.steps == metrics.step_seconds.count == len(one.calls("execute_model"))
    assert metrics.time_to_first_token.count == metrics.e2e_latency.count == 5
    ends = [end.metrics for end in one.ends.values()]
    assert metrics.preemptions == sum(end.num_preemptions for end in ends)
    assert metrics.cached_tokens == sum(end.num_cached_tokens for end in ends)
    assert metrics.queried_tokens == sum(map(len, PROMPTS.values()))
    for end in ends:
        assert end.arrival <= end.first_scheduled <= end.first_token <= end.finished
    plain = metrics.as_dict()
    assert plain["finished"] == {"length": 5}
    assert plain["blocks_held"] == plain["running"] == plain["waiting"] == 0
    assert plain["blocks_usable"] == 8


def test_two_engines_share_nothing(engine):
    first, second = engine(), engine()
    first.add("a", (1, 2), max_tokens=20)
    second.add("a", (1, 2), max_tokens=20)
    first.step()
    second.core.shutdown()
    first.run()
    assert first.ends["a"].finish_reason == "length"
    assert second.core.metrics.generated_tokens == 0
