"""Steps in flight, through a whole engine, over every executor (rows E10, Y3): as many as there are
stages, or one beside the running one. The dummy's next token is a function of what it reads through
a request's blocks, so a step that came too early, too late or twice shows in the tokens.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from hardpoint.config.loading import load_config
from hardpoint.errors import ConfigError, ExecutorFailedError, RemoteError, WorkerDiedError
from hardpoint.registry import Registry
from hardpoint.sampling_params import SamplingParams
from hardpoint.sleep import SleepStateError
from hardpoint_engine.build import start_engine
from hardpoint_engine.request import EngineRequest

PROMPTS = {f"r{n}": tuple((n * 31 + i) % 250 for i in range(2 + 4 * n)) for n in range(7)}
SAMPLINGS = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 7},
    "penalised": {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3},
}


SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 5,
    "vocab_size": 256,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A shape with more layers than stages."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return str(folder)


def start(model, executor, **keys):
    settings = {
        "model": model,
        "load_format": "dummy",
        "platform": "dummy",
        "executor": executor,
        "block_size": 4,
        "num_kv_blocks": 65,
        **keys,
    }
    config = load_config(overrides=settings, environ={})
    return start_engine(config, registry=Registry.discover(config))


class Engine:
    """An engine core, and what came out of it for each request."""

    def __init__(self, model, flavour, **keys):
        stages = {"pipeline_parallel_size": flavour.world_size}
        if flavour.world_size == 1:
            stages = {"async_scheduling": True}
        self.core = start(model, flavour.executor, **{**stages, **flavour.keys, **keys})
        self.depth = self.core.executor.max_concurrent_batches
        self.tokens = {}
        self.ends = {}
        self.most_in_flight = 0

    def add(self, req_id, prompt, *, max_tokens=10, **sampling):
        request = EngineRequest(
            req_id=req_id,
            prompt=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, **{"temperature": 0, **sampling}),
            arrival=time.monotonic(),
        )
        self.core.add_request(request)
        self.tokens[req_id] = ()
        self.ends.pop(req_id, None)

    def step(self):
        outputs = self.core.step()
        flying = len(self.core.scheduler.roster.in_flight)
        self.most_in_flight = max(self.most_in_flight, flying + 1)
        for output in outputs:
            assert output.req_id not in self.ends, "nothing follows the end"
            self.tokens[output.req_id] += output.new_tokens
            if output.finish_reason:
                self.ends[output.req_id] = output
        return outputs

    def run(self):
        for _ in range(20_000):
            if not self.core.has_unfinished():
                assert not self.core.scheduler.roster.in_flight
                assert not self.core.scheduler.blocks.pool.references
                return self
            self.step()
        raise AssertionError("requests never end")

    def ask(self, prompts, **options):
        for req_id, prompt in prompts.items():
            self.add(req_id, prompt, **options)
        self.run()
        return {req_id: self.tokens[req_id] for req_id in prompts}


@pytest.fixture
def flavour(one_of_a_kind):
    return one_of_a_kind


@pytest.fixture
def engine(model, flavour):
    """Start engines that keep several steps in flight; all are shut down."""
    started = []

    def make(**keys):
        started.append(Engine(model, flavour, **keys))
        return started[-1]

    yield make
    for each in started:
        each.core.shutdown()


@pytest.fixture(scope="module")
def kept():
    """An engine of each flavour, kept for the tests that leave it as they found it."""
    engines = {}
    yield engines
    for each in engines.values():
        each.core.shutdown()


@pytest.fixture
def one(kept, model, flavour):
    engine = kept.get(str(flavour.executor))
    if engine is None:
        engine = kept[str(flavour.executor)] = Engine(model, flavour)
    yield engine
    assert engine.core.alive
    engine.run()
    engine.tokens, engine.ends = {}, {}


@pytest.fixture(scope="module")
def expected(model):
    """What each sampling answers, one request and one step at a time."""
    answers = {}
    with start(model, "uni", enable_prefix_caching=False) as core:
        for name, sampling in SAMPLINGS.items():
            answers[name] = {
                req_id: alone(core, req_id, prompt, sampling) for req_id, prompt in PROMPTS.items()
            }
    return answers


def alone(core, req_id, prompt, sampling):
    core.add_request(
        EngineRequest(
            req_id=req_id,
            prompt=prompt,
            sampling=SamplingParams(max_tokens=10, **sampling),
            arrival=0.0,
        )
    )
    tokens = ()
    while core.has_unfinished():
        for output in core.step():
            tokens += output.new_tokens
    return tokens


def dawdle(worker, seed, most):
    """From now on let each step of this rank take a time of its own."""
    source = random.Random(f"{seed} {worker.rank}")
    execute = worker.execute_model

    def late(scheduler_output):
        time.sleep(source.random() * most)
        return execute(scheduler_output)

    worker.execute_model = late


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_tokens_are_those_of_one_step_at_a_time(one, expected, sampling):
    assert one.ask(PROMPTS, **SAMPLINGS[sampling]) == expected[sampling]
    assert one.depth > 1
    assert one.most_in_flight == one.depth


@pytest.mark.parametrize(
    "keys",
    [
        {"prefill_chunk_size": 3},
        {"num_kv_blocks": 13, "max_model_len": 40},
        {"num_kv_blocks": 11, "max_model_len": 40, "enable_prefix_caching": False},
        {"plugins.dummy.mixed_batches": False, "plugins.dummy.max_prefills_per_step": 1},
    ],
    ids=str,
)
def test_whatever_the_delays_and_the_pressure(engine, expected, keys):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed: {seed}")
    source = random.Random(seed)
    one = engine(**keys)
    one.core.executor.collective_rpc(dawdle, args=(seed, 0.002))
    waiting = dict(PROMPTS)
    aborted = set()
    while waiting or one.core.has_unfinished():
        if waiting and source.random() < 0.5:
            req_id = source.choice(sorted(waiting))
            one.add(req_id, waiting.pop(req_id), temperature=0)
        if one.tokens and source.random() < 0.03:
            victim = source.choice(sorted(one.tokens))
            if one.core.abort(victim):
                aborted.add(victim)
        one.step()
    for req_id, tokens in one.tokens.items():
        answer = expected["greedy"][req_id]
        assert tokens == answer[: len(tokens)], f"seed {seed}: {req_id}"
        assert req_id in aborted or tokens == answer
    assert one.most_in_flight > 1 or "num_kv_blocks" in keys


def work_side_by_side(worker, folder, last):
    """Until step ``last``, let the last stage end a step only when the first has begun the one that
    fills the pipeline behind it.
    """
    folder, execute = Path(folder), worker.execute_model
    stages = worker.context.world_size

    def staged(scheduler_output):
        step_id = scheduler_output.step_id
        (folder / f"{worker.rank}-{step_id}").touch()
        output = execute(scheduler_output)
        if worker.rank == stages - 1 and step_id <= last:
            end = time.monotonic() + 20
            while not (folder / f"0-{step_id + stages - 1}").exists():
                if time.monotonic() > end:
                    raise TimeoutError("the first stage is idle")
                time.sleep(0.001)
        return output

    worker.execute_model = staged


def test_no_stage_idles_while_another_works(engine, flavour, expected, tmp_path):
    if flavour.world_size == 1:
        pytest.skip("it takes two stages to work side by side")
    one = engine()
    one.core.executor.collective_rpc(work_side_by_side, args=(str(tmp_path), 12))
    assert one.ask(PROMPTS) == expected["greedy"]


def test_results_come_in_the_order_of_the_steps(one, monkeypatch):
    execute, futures = one.core.executor.execute_model, []

    def noting(plan, non_block):
        future = execute(plan, non_block)
        futures.append((plan.step_id, future))
        return future

    monkeypatch.setattr(one.core.executor, "execute_model", noting)
    for req_id in ("a", "b", "c"):
        one.add(req_id, (1, 2, ord(req_id)), max_tokens=5)
    while one.core.has_unfinished():
        outputs = one.step()
        landed = len(futures) - len(one.core.scheduler.roster.in_flight)
        assert all(future.done() for _, future in futures[:landed])
        first = futures[0][0]
        assert [step_id for step_id, _ in futures] == list(range(first, first + len(futures)))
        assert all(len(output.new_tokens) == 1 for output in outputs)


def test_a_failed_step_ends_its_own_requests(engine, expected):
    for nth in (1, 4):
        one = engine(**{"plugins.dummy.fail_at": f"step:{nth}"})
        one.ask(PROMPTS, temperature=0)
        failed = {req_id for req_id, end in one.ends.items() if end.finish_reason == "error"}
        assert 0 < len(failed) < len(PROMPTS)
        assert one.core.metrics.failed_steps == 1
        for req_id, tokens in one.tokens.items():
            answer = expected["greedy"][req_id]
            if req_id in failed:
                error = one.ends[req_id].error
                assert isinstance(error, RemoteError)
                assert "injected fault" in str(error)
                assert tokens == answer[: len(tokens)]
            else:
                assert tokens == answer
        assert one.ask({"again": PROMPTS["r3"]})["again"] == expected["greedy"]["r3"]
        one.core.shutdown()


def test_a_step_that_cannot_be_sent_fails_alone(one, expected):
    for req_id in ("r0", "r1", "r2", "r3"):
        one.add(req_id, PROMPTS[req_id])
    one.step()
    send = one.core.executor.call_workers

    def broken(call):
        one.core.executor.call_workers = send
        raise OSError("no room in the channel")

    one.core.executor.call_workers = broken
    one.run()
    failed = {req_id for req_id, end in one.ends.items() if end.finish_reason == "error"}
    assert 0 < len(failed) < 4
    for req_id, end in one.ends.items():
        assert req_id not in failed or "no room" in str(end.error)
        assert req_id in failed or one.tokens[req_id] == expected["greedy"][req_id]


def test_every_request_ends_once_when_the_executor_fails(engine):
    one = engine()
    for req_id, prompt in PROMPTS.items():
        one.add(req_id, prompt, max_tokens=50)
    one.step()
    one.core.executor.fail(OSError("gone"))
    one.run()
    assert set(one.ends) == set(PROMPTS)
    assert {str(end.error) for end in one.ends.values()} == {"gone"}
    with pytest.raises(ExecutorFailedError):
        one.core.step()


def test_every_request_ends_once_when_a_worker_dies_with_steps_in_flight(engine, flavour):
    if not flavour.processes:
        pytest.skip("its worker is a thread of this process")
    one = engine(**{"plugins.dummy.step_seconds": 0.2})
    pids = one.core.executor.collective_rpc(pid_of)
    for req_id, prompt in PROMPTS.items():
        one.add(req_id, prompt, max_tokens=50)
    one.step()
    assert len(one.core.scheduler.roster.in_flight) == one.depth - 1
    os.kill(pids[-1], signal.SIGKILL)
    one.run()
    assert set(one.ends) == set(PROMPTS)
    for end in one.ends.values():
        assert isinstance(end.error, WorkerDiedError)
        assert (end.error.rank, end.error.exit) == (len(pids) - 1, -signal.SIGKILL)


def pid_of(worker):
    return os.getpid()


def test_shut_down_with_steps_in_flight(engine):
    one = engine(**{"plugins.dummy.step_seconds": 30.0})
    for req_id, prompt in PROMPTS.items():
        one.add(req_id, prompt)
    stepping = threading.Thread(target=one.step)
    stepping.start()
    while len(one.core.scheduler.roster.in_flight) < one.depth:
        assert stepping.is_alive()
    one.core.shutdown(5)
    stepping.join(60)
    assert not stepping.is_alive()
    one.run()
    assert {end.finish_reason for end in one.ends.values()} == {"abort"}


def test_sleep_with_steps_in_flight_lets_them_land_first(one, expected):
    before = one.core.metrics.preemptions
    for req_id, prompt in PROMPTS.items():
        one.add(req_id, prompt)
    for _ in range(3):
        one.step()
    flying = len(one.core.scheduler.roster.in_flight)
    assert flying == one.depth - 1
    one.core.executor.sleep(1)
    for _ in range(flying):
        assert one.step()
    with pytest.raises(SleepStateError, match="wake_up"):
        one.step()
    one.core.executor.wake_up()
    one.run()
    assert one.tokens == expected["greedy"]
    assert one.core.metrics.preemptions > before


def test_so_do_those_in_flight_when_the_weights_are_dropped(one, expected):
    for req_id, prompt in PROMPTS.items():
        one.add(req_id, prompt)
    for _ in range(3):
        one.step()
    flying = len(one.core.scheduler.roster.in_flight)
    one.core.executor.discard(["weights"])
    for _ in range(flying):
        assert one.step()
    with pytest.raises(SleepStateError, match="wake_up"):
        one.step()
    one.core.executor.wake_up()
    with pytest.raises(SleepStateError, match="reload_weights"):
        one.step()
    one.core.executor.reload_weights()
    one.run()
    assert one.tokens == expected["greedy"]


def test_a_cache_that_was_lost_meanwhile_is_given_up_when_all_have_landed(one, expected):
    before = one.core.metrics.preemptions
    for req_id, prompt in PROMPTS.items():
        one.add(req_id, prompt)
    for _ in range(3):
        one.step()
    one.core.executor.sleep(1)
    one.core.executor.wake_up()
    one.run()
    assert one.tokens == expected["greedy"]
    assert one.core.metrics.preemptions > before


def test_all_aborted_with_steps_in_flight_leaves_nothing_in_flight(one, expected):
    for req_id, prompt in PROMPTS.items():
        one.add(req_id, prompt)
    one.step()
    for req_id in PROMPTS:
        one.core.abort(req_id)
    assert one.core.has_unfinished()
    one.run()
    assert {end.finish_reason for end in one.ends.values()} == {"abort"}
    assert one.ask(PROMPTS) == expected["greedy"]


def test_stages_need_an_executor_that_spreads_them(model, flavour):
    if flavour.world_size > 1:
        assert flavour.executor == "mp" or flavour.executor.supports_pp
        return
    with pytest.raises(ConfigError, match="cannot spread pipeline stages"):
        start(model, flavour.executor, pipeline_parallel_size=2)
