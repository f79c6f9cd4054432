"""What each rank of the tests runs, on the dummy platform: ``rank_program.py SCENE [KEY=VALUE]``.

A line ``at NAME`` on standard output says how far it has come.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time


def told(*names):
    """Return the number that one of these variables has, whichever launcher set it."""
    return next(int(os.environ[name]) for name in names if name in os.environ)


RANK = told("OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "RANK")
SIZE = told("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE")
KEYS = {
    "model": "dummy",
    "load_format": "dummy",
    "platform": "dummy",
    "executor": "external_launcher",
    "block_size": 4,
    "max_model_len": 64,
    "rpc.heartbeat": 0.05,
    "plugins.dummy.num_workers": SIZE,
}


def say(*words):
    print(*words, flush=True)


def start(**keys):
    from hardpoint.config.loading import load_config
    from hardpoint_engine import LLM

    given = {}
    for argument in sys.argv[2:]:
        name, _, value = argument.partition("=")
        given[name] = json.loads(value)
    if place := os.environ.get("ADDRESS_OF_TEST"):
        given["plugins.external_launcher.address"] = place
    return LLM.from_config(load_config(overrides={**KEYS, **keys, **given}, environ={}))


def params(**keys):
    from hardpoint_engine import SamplingParams

    return SamplingParams(max_tokens=8, ignore_eos=True, **keys)


def tokens(llm, count=3, **keys):
    results = llm.generate([[1, 2, 3 + number] for number in range(count)], params(**keys))
    return [list(result.outputs[0].token_ids) for result in results]


def go():
    """Wait until the test says so."""
    say("at gate")
    if sys.stdin.readline() != "go\n":
        raise SystemExit("the test has ended")


def generate():
    from hardpoint.rpc.network.listening import listening

    with start() as llm:
        drawn = tokens(llm, count=13, temperature=1.0)
        say(json.dumps({"greedy": tokens(llm, temperature=0), "drawn": drawn}))
        say(json.dumps(llm.collective_rpc(rank_of)))
        say(json.dumps(llm.collective_rpc(rank_of, reply_rank=1)))
        say(json.dumps(sorted(listening(os.getpid()))))
        health = llm.executor.check_health()
        say(json.dumps([report.rank for report in health]))


def tokens_of_one():
    with start() as llm:
        say(json.dumps(tokens(llm, temperature=0)))


def rank_of(worker):
    return worker.rank


def steps():
    with start() as llm:
        say(json.dumps(tokens(llm, temperature=0)))


def long_steps():
    """Runs until something ends it."""
    with start(**{"plugins.dummy.step_seconds": 1.0}) as llm:
        say("at step")
        for _ in range(20):
            tokens(llm, temperature=0)


def twice():
    for _ in range(2):
        with start() as llm:
            say(json.dumps(tokens(llm, temperature=0)))


def twice_with_a_gate():
    with start() as llm:
        tokens(llm, temperature=0)
        go()
    with start() as llm:
        tokens(llm, temperature=0)


def differ():
    """One rank computes another prompt."""
    with start() as llm:
        llm.generate([[1, 2, 3]], params(temperature=0))
        go()
        llm.generate([[1, 2, 4 if RANK == 1 else 3]], params(temperature=0))


def differ_in_samples():
    """One rank's worker chooses another token than the others' in its third step."""
    from hardpoint_dummy import rows

    if RANK == 1:
        chosen, made = rows.choose, []

        def other(*given):
            made.append(chosen(*given))
            return made[-1] + (len(made) == 3)

        rows.choose = other
    with start() as llm:
        llm.generate([[1, 2, 3]], params(temperature=0))


def differ_in_calls():
    """One rank makes another call."""
    with start() as llm:
        go()
        llm.collective_rpc("supported_tasks" if RANK == 1 else "get_kv_cache_spec")


def fewer():
    """One rank is done before the others."""
    with start() as llm:
        llm.generate([[1, 2, 3]], params(temperature=0))
        if RANK != 1:
            llm.generate([[1, 2, 4]], params(temperature=0))


def failing():
    """One worker raises in a call; the group goes on."""
    from hardpoint.errors import CallTimeoutError, RemoteError

    with start() as llm:
        try:
            llm.collective_rpc(raise_on, args=(1,))
        except RemoteError as error:
            say(error.rank, error.type_name, error.__cause__)
        try:
            llm.collective_rpc(slow_on, args=(1, 1.5), timeout=0.3)
        except CallTimeoutError as error:
            say("late", "[1]" in str(error))
        say(json.dumps(tokens(llm, temperature=0)))
        say(llm.executor.calls.pending)


def raise_on(worker, rank):
    if worker.rank == rank:
        raise KeyError("of this rank")


def slow_on(worker, rank, seconds):
    if worker.rank == rank:
        time.sleep(seconds)


def own_block_size():
    with start(block_size=4 << RANK):
        pass


def memory():
    """Rank 1 has less memory."""
    if RANK == 1:
        from hardpoint_dummy.worker import DummyWorker

        DummyWorker.determine_available_memory = lambda self: 40_000
    with start() as llm:
        say(llm.core.kv_plan.configs[0].num_blocks)


def held():
    """Rank 1's worker waits in a call until the process is ended from outside."""
    with start() as llm:
        say("at step")
        llm.collective_rpc(held_on, args=(1,))


def held_on(worker, rank):
    if worker.rank == rank:
        threading.Event().wait()


def idle():
    """All wait between calls."""
    with start() as llm:
        failed = threading.Event()
        llm.executor.register_failure_callback(lambda error: failed.set())
        say("at gate")
        if RANK == 1 or not failed.wait(60):
            sys.stdin.readline()
        llm.collective_rpc("supported_tasks")


def looping():
    """Rank 0 drives, by both ways to say what a step is."""
    from hardpoint.v0.worker_loop import LOOP

    with start() as llm:
        executor = llm.executor
        loops = []
        run = executor._run_workers
        executor._run_workers = lambda method, *a, **k: loops.append(method) or run(method, *a, **k)
        first, second = (tokens(llm, temperature=0) for _ in range(2))
        say("loops", loops.count(LOOP))
        say("ranks", json.dumps(llm.collective_rpc(rank_of)))
        say("after", executor.parallel_worker_tasks)
        say("same", json.dumps(first == second))
        say("tokens", json.dumps(first))
        say("older", older_tokens(executor))
        say("spans", json.dumps(executor._run_workers(span, max_concurrent_workers=1)))
        (others,) = executor._run_workers(rank_of, async_run_tensor_parallel_workers_only=True)
        say("parts", others.result())
        executor.stop_remote_worker_execution_loop()


def named():
    """Rank 0 drives ranks on other hosts, to which calls by name alone can be sent."""
    from hardpoint.errors import EncodingError

    with start() as llm:
        say(json.dumps(tokens(llm, temperature=0)))
        say(json.dumps(llm.collective_rpc("supported_tasks")))
        say(len(llm.executor.check_health()))
        try:
            llm.collective_rpc(rank_of)
        except EncodingError as error:
            say(error)
        say(json.dumps(tokens(llm, temperature=0)))


def older_tokens(executor):
    from hardpoint.sampling_params import SamplingParams
    from hardpoint.v0.messages import ExecuteModelRequest, SequenceData, SequenceGroupMetadata

    prompt, said = (1, 2, 3), []
    executor.converter._step_id = 1_000
    for _ in range(8):
        known = len(prompt) + len(said)
        group = SequenceGroupMetadata(
            request_id="older",
            is_prompt=not said,
            seq_data={
                0: SequenceData(
                    prompt_token_ids=prompt,
                    output_token_ids=tuple(said),
                    num_computed_tokens=known - 1 if said else 0,
                )
            },
            block_tables={0: (1, 2, 3)},
            sampling_params=SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
        )
        (output,) = executor.execute_model(ExecuteModelRequest(seq_group_metadata_list=[group]))
        said.append(output.outputs[0].samples[0].output_token)
    return len(said)


def span(worker):
    began = time.monotonic()
    time.sleep(0.05)
    return began, time.monotonic()


def loop_fails():
    from hardpoint.errors import RemoteError

    with start() as llm:
        try:
            tokens(llm, count=1, temperature=0)
        except RemoteError as error:
            say("step", type(error).__name__, str(error))
        try:
            llm.executor.stop_remote_worker_execution_loop()
        except RemoteError as error:
            say("loop", type(error).__name__, str(error))
        say("after", json.dumps(llm.collective_rpc(rank_of)))


def missing():
    """Rank 1 does not come."""
    if RANK == 0:
        start()


def main():
    began = time.monotonic()
    try:
        globals()[sys.argv[1]]()
    except Exception as error:
        say("error", type(error).__name__, str(error).replace("\n", " "))
        raise
    finally:
        print(f"{time.monotonic() - began:.1f} s", file=sys.stderr)


main()
