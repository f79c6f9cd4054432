"""Models over several workers of the executor mp: the tokens of one worker, and clean ends."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hardpoint.errors import ConfigError, ExecutorFailedError, RemoteError
from hardpoint.messages import SchedulerOutput
from hardpoint.rpc.network.listening import listening


def _small_engine():
    spec = importlib.util.spec_from_file_location(
        "small_engine", Path(__file__).with_name("small_engine.py")
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


small_engine = _small_engine()
PATIENCE = 60.0
SOON = 6.0
"""Bound of what takes a second, on a machine that is busy with other things."""


def start(tensor=1, pipeline=1, **keys):
    return small_engine.start(
        executor="mp", tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, **keys
    )


@pytest.fixture(scope="module")
def shards(expected):
    """Two tensor shards, for tests that leave them as they were: forked, or it is an error, though
    a worker has lived in this process.
    """
    with start(2, **{"plugins.mp.start": "nursery"}) as llm:
        yield llm


@pytest.fixture(scope="module")
def stages():
    """Two pipeline stages, for tests that leave them as they were."""
    with start(1, 2) as llm:
        yield llm


def test_on_one_host_no_process_listens(shards):
    """As the doctor says: the cpu's workers share memory, so the collectives need no socket."""
    workers = [worker.pid for worker in shards.executor._resources.group._workers]
    assert len(workers) == 2
    assert [listening(pid) for pid in workers] == [set(), set()]


@pytest.fixture
def spread(request, tensor, pipeline):
    shared = {(2, 1): "shards", (1, 2): "stages"}.get((tensor, pipeline))
    if shared is not None:
        yield request.getfixturevalue(shared)
        return
    with start(tensor, pipeline) as llm:
        yield llm


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (3, 1), (1, 2), (1, 3), (2, 2)], ids=str)
def test_the_tokens_are_those_of_one_worker(expected, spread, tensor, pipeline):
    executor = spread.executor
    assert executor.world_size == tensor * pipeline
    assert executor.output_rank == (pipeline - 1) * tensor
    found = small_engine.answers(spread)
    held = spread.collective_rpc(bytes_of_weights)
    specs = executor.get_kv_cache_specs()
    blocks = spread.collective_rpc(num_blocks)
    shares = spread.collective_rpc(cores_and_threads)
    assert found["tokens"] == expected["tokens"]
    for row, wanted in zip(found["logprobs"], expected["logprobs"], strict=True):
        assert row == pytest.approx(wanted, abs=1e-4)
    assert found["preemptions"] > 0
    assert max(held) < sum(held) / tensor / pipeline * 2
    keep_apart_or_share(shares)
    assert blocks == [small_engine.KEYS["num_kv_blocks"]] * (tensor * pipeline)
    layers = [len(each) for each in specs]
    kv_heads = [next(iter(each.values())).num_kv_heads for each in specs]
    assert sum(layers) == 5 * tensor  # consecutive, and every one on every shard
    assert all(list(each) == sorted(each) for each in specs)
    assert [sum(kv_heads[at : at + tensor]) for at in range(0, len(specs), tensor)] == [
        3
    ] * pipeline


def test_with_gloo_too(expected):
    with start(2, 2, **{"plugins.cpu.collectives": "gloo"}) as llm:
        kinds = llm.collective_rpc(kind_of_groups)
        assert kinds == ["ProcessGroupCommunicator"] * 4
        found = sockets_of(llm)
        assert found[0] == found[1] == set(), "driver and nursery have none"
        assert set().union(*found[2:]) == {"tcp 0100007F"}, "loopback alone"
        assert small_engine.answers(llm)["tokens"] == expected["tokens"]


def test_a_step_is_one_message_to_the_next_stage_and_an_empty_one_is_none(stages):
    """Counted on the line between two stages, over whole generations."""
    stages.collective_rpc(count_messages)
    before = stages.metrics.steps
    for _ in range(2):  # the second one's first plan says that the first has finished
        stages.generate([[1, 2, 3]], small_engine.sampling()[0])
    sent = stages.collective_rpc(messages)
    steps = stages.metrics.steps - before
    assert sent[0]["receive"] == sent[1]["send"] == 0
    assert sent[0]["send"] == sent[1]["receive"]
    assert 0 < sent[0]["send"] <= 2 * steps  # a header, and what is handed on
    stages.executor.execute_model(SchedulerOutput(step_id=10**6))
    assert stages.collective_rpc(messages) == sent


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"tensor_parallel_size": 4}, "tensor_parallel_size"),
        ({"tensor_parallel_size": 12}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 6}, "pipeline_parallel_size"),
    ],
)
def test_sizes_by_which_the_model_cannot_be_split_are_refused_before_anything_starts(keys, key):
    with pytest.raises(ConfigError) as caught:
        small_engine.start(executor="mp", **keys)
    assert [problem.key for problem in caught.value.problems] == [key]


# Ends.


@pytest.fixture
def two_shards():
    llm = start(2)
    yield llm
    llm.shutdown()


def test_an_exception_on_one_rank_releases_the_peer_that_waits_for_it(two_shards, tmp_path):
    """Rank 0 waits in a collective that rank 1 never reaches."""
    executor = two_shards.executor
    started = time.monotonic()
    with pytest.raises((RemoteError, ExecutorFailedError)) as caught:
        executor.collective_rpc(reduce_but_fail_on, args=(1, str(tmp_path / "how")))
    first = caught.value if isinstance(caught.value, RemoteError) else caught.value.__cause__
    assert isinstance(first, RemoteError)
    assert first.rank == 1
    assert "rank 1 does not feel like it" in str(first)
    assert time.monotonic() - started < SOON

    wait_for((tmp_path / "how").exists)
    assert (tmp_path / "how").read_text() == "CollectiveEndedError"
    wait_for(lambda: executor.failure is not None)
    assert "rank 1 does not feel like it" in str(executor.failure)
    with pytest.raises(ExecutorFailedError, match="rank 1 does not feel like it"):
        executor.check_health()
    started = time.monotonic()
    two_shards.shutdown()
    assert time.monotonic() - started < SOON


def test_shutdown_ends_a_rank_that_waits_for_another(two_shards, tmp_path):
    waiting = two_shards.executor.collective_rpc(
        reduce_late_on, args=(1, str(tmp_path)), non_block=True
    )
    wait_for((tmp_path / "entered").exists)
    started = time.monotonic()
    two_shards.shutdown()
    assert time.monotonic() - started < SOON
    assert waiting.done()


def test_a_call_that_fails_on_every_rank_alike_ends_nothing(shards):
    with pytest.raises(RemoteError, match="all of us"):
        shards.executor.collective_rpc(reduce_then_fail)
    results = shards.generate([[1, 2, 3]], small_engine.sampling()[0])
    assert len(results[0].outputs[0].token_ids) == 16


def test_nothing_listens_where_ranks_meet_in_memory(shards):
    shards.generate([[1, 2, 3]], small_engine.sampling()[0])
    assert sockets_of(shards) == [set()] * 4


def test_two_engines_side_by_side(shards, stages):
    results = {}

    def run(name, llm):
        answer = llm.generate([[5, 6, 7]], small_engine.sampling()[0])
        results[name] = answer[0].outputs[0].token_ids

    pairs = [("shards", shards), ("stages", stages)]
    threads = [threading.Thread(target=run, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(results) == 2
    assert results["shards"] == results["stages"]


def keep_apart_or_share(shares):
    """See that workers have cores of their own, or, where there are too few, one thread each."""
    mine = os.sched_getaffinity(0)
    together = [core for cores, _ in shares for core in cores]
    assert set(together) <= mine
    if len(shares) <= len(mine):
        assert len(together) == len(set(together))
    else:
        assert {(len(cores), threads) for cores, threads in shares} == {(1, 1)}
    assert all(threads <= len(cores) for cores, threads in shares)


def sockets_of(llm):
    """Return where driver, nursery and each worker can be reached, as far as others could: what is
    listened at, and what has a name. Addresses are hexadecimal.
    """
    pids = llm.collective_rpc(process_ids)
    return [reachable(pid) for pid in (os.getpid(), pids[0][1], *(pid for pid, _ in pids))]


def reachable(pid):
    mine = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            mine.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in mine and (fields[3] == "0A" or not table.startswith("tcp")):
                found.add(f"{table} {fields[1].split(':')[0]}")
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in mine and len(fields) > 7:
            found.add(f"unix {fields[7]}")
    return found


def wait_for(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("it never came true")
        time.sleep(0.005)


# Called in the workers, where this module is not.


def bytes_of_weights(worker):
    return sum(p.numel() * p.element_size() for p in worker.get_model().parameters())


def num_blocks(worker):
    return worker.model_runner.kv_cache.plan.num_blocks


def cores_and_threads(worker):
    import os

    import torch

    return sorted(os.sched_getaffinity(0)), torch.get_num_threads()


def kind_of_groups(worker):
    kinds = {type(group).__name__ for group in (worker.seat.tensor, worker.seat.pipeline)}
    return ", ".join(sorted(kinds))


def count_messages(worker):
    line, counts = worker.seat.pipeline, {"send": 0, "receive": 0}

    def counting(name, original):
        def counted(*args):
            counts[name] += 1
            return original(*args)

        return counted

    for name in counts:
        setattr(line, name, counting(name, getattr(line, name)))
    line.counts = counts


def messages(worker):
    return worker.seat.pipeline.counts


def reduce_but_fail_on(worker, rank, path):
    from pathlib import Path

    import torch

    if worker.rank == rank:
        raise RuntimeError(f"rank {rank} does not feel like it")
    try:
        worker.seat.tensor.all_reduce(torch.ones(3))
    except Exception as error:
        Path(path + ".new").write_text(type(error).__name__)
        Path(path + ".new").rename(path)
        raise


def reduce_late_on(worker, rank, folder):
    import time
    from pathlib import Path

    import torch

    if worker.rank == rank:
        while not worker.context.cancelled():
            time.sleep(0.01)
        return
    Path(folder, "entered").touch()
    worker.seat.tensor.all_reduce(torch.ones(3))


def reduce_then_fail(worker):
    import torch

    worker.seat.tensor.all_reduce(torch.ones(3))
    raise RuntimeError("all of us")


def process_ids(worker):
    import os

    return os.getpid(), os.getppid()


for _function in (
    bytes_of_weights, num_blocks, cores_and_threads, kind_of_groups, count_messages, messages,
    reduce_but_fail_on, reduce_late_on, reduce_then_fail, process_ids,
):  # fmt: skip
    _function.__module__ = "__main__"  # so that they travel by value
assert "small_engine" not in sys.modules
