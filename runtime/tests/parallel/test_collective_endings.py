"""How waits end that cannot be satisfied: ended, cancelled, late, dead, left."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from attrs import evolve
from hardpoint.errors import CancelledStepError, ConfigError, HardpointError, UnsupportedError
from hardpoint_runtime.parallel.arena import Arena
from hardpoint_runtime.parallel.communicator import Meeting, TensorShape
from hardpoint_runtime.parallel.errors import (
    CollectiveEndedError,
    CollectiveTimeoutError,
    PeerLostError,
)
from hardpoint_runtime.parallel.groups import Axis, Topology
from hardpoint_runtime.parallel.host import host_communicator

SOON = 5.0
"""Bound for what takes some ten milliseconds, on a machine that is busy with other things."""

OPERATIONS = {
    "all_reduce": lambda c: c.all_reduce(torch.ones(4)),
    "all_gather": lambda c: c.all_gather(torch.ones(4), [4] * c.size),
    "broadcast": lambda c: c.broadcast(torch.ones(4), 1),
    "barrier": lambda c: c.barrier(),
    "receive": lambda c: c.receive({"x": TensorShape(shape=(4,), dtype=torch.float32)}, 1),
}


@pytest.fixture(params=OPERATIONS)
def operation(request, kind):
    if request.param == "receive" and kind == "gloo":
        pytest.skip("gloo's pairs are joined first")
    return request.param


class Waiting:
    """One rank in an operation, the other away until ``leave``."""

    def __init__(self, ranks, later, operation, **keys):
        self.entered, self.leave = threading.Event(), threading.Event()
        self.ended_at = None
        self.results = []
        self.communicators = {}

        def run(communicator):
            self.communicators[communicator.index] = communicator
            if communicator.index:
                assert self.leave.wait(60)
                return None
            self.entered.set()
            try:
                return OPERATIONS[operation](communicator)
            finally:
                self.ended_at = time.monotonic()

        def both():
            self.results = ranks.run(2, run, **keys)

        self.thread = later(both)
        assert self.entered.wait(60), self.results

    def finish(self):
        """Return what the waiting rank raised."""
        end = time.monotonic() + 60
        while self.ended_at is None and time.monotonic() < end:
            time.sleep(0.005)
        self.leave.set()
        self.thread.join(60)
        return self.results[0]


def test_end_from_another_thread_releases_a_wait_at_once(ranks, later, operation):
    waiting = Waiting(ranks, later, operation)
    started = time.monotonic()
    waiting.communicators[0].end()
    error = waiting.finish()
    assert isinstance(error, CollectiveEndedError)
    assert f"{operation} in group tensor-0 (ranks 0, 1): it was ended from outside" in str(error)
    assert (error.group, error.operation) == ("tensor-0 (ranks 0, 1)", operation)
    assert waiting.ended_at - started < SOON


def test_one_ranks_end_releases_the_others(memory_ranks, later):
    waiting = Waiting(memory_ranks, later, "all_reduce")
    while 1 not in waiting.communicators:
        time.sleep(0.005)
    waiting.communicators[1].end()
    assert isinstance(waiting.finish(), CollectiveEndedError)


def test_a_cancelled_step_leaves(ranks, later, operation):
    cancelled = threading.Event()
    waiting = Waiting(ranks, later, operation, cancelled=cancelled.is_set)
    started = time.monotonic()
    cancelled.set()
    error = waiting.finish()
    assert isinstance(error, CancelledStepError)
    assert operation in str(error)
    assert waiting.ended_at - started < SOON


def test_a_silent_peer_is_a_timeout_that_names_it(memory_ranks, later):
    started = time.monotonic()
    waiting = Waiting(memory_ranks, later, "all_reduce", timeout=0.2)
    error = waiting.finish()
    assert isinstance(error, CollectiveTimeoutError)
    assert isinstance(error, TimeoutError)
    assert "rank 1 did not come within 0.2 s" in str(error)
    assert error.ranks == (1,)
    assert 0.2 <= waiting.ended_at - started < SOON


def test_a_peer_that_leaves_is_lost(memory_ranks, later):
    waiting = Waiting(memory_ranks, later, "all_reduce")
    waiting.leave.set()
    error = waiting.finish()
    assert isinstance(error, PeerLostError)
    assert "rank 1 ended, or left" in str(error)


def test_a_group_that_failed_or_was_left_serves_no_more(memory_ranks):
    def run(communicator):
        if communicator.index:
            return None
        with pytest.raises((PeerLostError, CollectiveTimeoutError)):
            communicator.barrier()
        with pytest.raises(CollectiveEndedError, match="it failed: barrier in group"):
            communicator.barrier()
        communicator.close()
        communicator.close()
        communicator.end()
        with pytest.raises(CollectiveEndedError):
            communicator.send({}, 1)
        return "done"

    assert memory_ranks.run(2, run)[0] == "done"


def test_whoever_waits_for_a_member_that_never_joins(memory_ranks):
    with pytest.raises(CollectiveTimeoutError, match=r"join in .*: ranks 1, 2 did not come"):
        memory_ranks.join(3, 0, timeout=0.1)
    ended = threading.Event()
    ended.set()
    with pytest.raises(CollectiveEndedError, match="join in group"):
        memory_ranks.join(3, 0, ended=ended)


PEER = """
import sys
import torch
from attrs import evolve
sys.path[:0] = {path!r}
from hardpoint_runtime.parallel.communicator import Meeting
from hardpoint_runtime.parallel.groups import Axis, Topology
from hardpoint_runtime.parallel.host import host_communicator
group = Topology(tensor=2).group_of(Axis.TENSOR, 1)
meeting = Meeting(rank=1, rendezvous={rendezvous!r})
for axis in (Axis.TENSOR, Axis.DATA):
    mine = host_communicator(evolve(group, axis=axis), meeting, {kind!r})
    mine.all_reduce(torch.ones(4))
    globals()[axis.value] = mine
print("joined", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def peer(rendezvous, kind):
    """A process that is rank 1 of 2 in two groups, does one all_reduce in each and then nothing."""
    descriptor = int(rendezvous.rsplit("/", 1)[1])
    program = PEER.format(path=sys.path, rendezvous=rendezvous, kind=kind)
    started = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[descriptor],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    yield started
    started.kill()
    started.communicate()


def test_a_stopped_peer_is_late_and_a_killed_one_is_lost_long_before_the_timeout(ranks, peer, kind):
    groups = []
    for axis in (Axis.TENSOR, Axis.DATA):
        groups.append(ranks.join(2, 0, axis))
        assert torch.equal(groups[-1].all_reduce(torch.ones(4)), torch.full((4,), 2.0))
    assert peer.stdout.readline() == b"joined\n"

    peer.send_signal(signal.SIGSTOP)
    groups[0].meeting = evolve(groups[0].meeting, timeout=0.3)
    with pytest.raises(CollectiveTimeoutError):
        groups[0].barrier()

    peer.send_signal(signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        groups[1].all_reduce(torch.ones(4))
    assert time.monotonic() - started < SOON
    if kind == "shared_memory":
        assert caught.value.ranks == (1,)
    for mine in groups:
        mine.close()


def listeners():
    """Return inode -> local address (hexadecimal) of the sockets on which this process listens."""
    mine = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            mine.add(str(link.readlink()))
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                found[fields[9]] = fields[1].split(":")[0]
    return found


def test_what_listens_on_a_network(ranks, kind, failing):
    """Nothing in shared memory; with gloo the loopback address only."""
    before = listeners()

    def run(communicator):
        communicator.barrier()
        found = listeners()
        communicator.barrier()
        return found

    found = failing(ranks.run(2, run))[0]
    new = {address for inode, address in found.items() if inode not in before}
    assert new == (set() if kind == "shared_memory" else {"0100007F"})


def test_nothing_is_left_of_a_group(memory_ranks, failing):
    failing(memory_ranks.run(2, lambda c: c.all_reduce(torch.ones(3)) is None))
    gc.collect()
    assert "test-rendezvous" not in Path("/proc/self/maps").read_text()
    links = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(link.stat().st_ino)
    own = Path(memory_ranks.rendezvous.removeprefix("file://")).stat().st_ino
    assert links.count(own) == 1  # the test's own


# The rendezvous.


def group():
    return Topology(tensor=2).group_of(Axis.TENSOR, 0)


def test_a_rendezvous_that_is_no_file():
    with pytest.raises(UnsupportedError, match=r"rendezvous 'tcp://10\.0\.0\.1:1'"):
        host_communicator(group(), Meeting(rank=0, rendezvous="tcp://10.0.0.1:1"))


def test_a_rendezvous_that_is_not_there(tmp_path):
    with pytest.raises(HardpointError, match="cannot be opened"):
        host_communicator(group(), Meeting(rank=0, rendezvous=f"file://{tmp_path}/none"))


def test_a_kind_that_there_is_not(rendezvous):
    with pytest.raises(ConfigError, match="no collectives of kind 'pigeon'"):
        host_communicator(group(), Meeting(rank=0, rendezvous=rendezvous), "pigeon")


def test_a_rendezvous_in_use_for_something_else(rendezvous, tmp_path):
    path = tmp_path / "other"
    path.write_bytes(b"somebody else's content")
    arena = Arena(str(path))
    with pytest.raises(HardpointError, match="other content"):
        arena.region("a", 4096)
    arena.close()


def test_regions_are_apart_and_zero_and_of_one_size(tmp_path):
    path = tmp_path / "file"
    path.touch()
    first, second = Arena(str(path)), Arena(str(path))
    a, b = first.region("a", 5000), first.region("b", 5000)
    assert a[:] == b[:] == bytes(5000)
    a[:] = b"a" * 5000
    assert b[:] == bytes(5000)
    assert second.region("a", 5000)[:] == b"a" * 5000
    with pytest.raises(HardpointError, match=r"region 'a' .* has 5000 bytes, not 6000"):
        second.region("a", 6000)
    for arena in (first, second):
        arena.close()
        arena.close()
    with pytest.raises(HardpointError, match="was closed"):
        first.region("a", 5000)


def test_signs_of_life(tmp_path):
    path = tmp_path / "file"
    path.touch()
    first, second = Arena(str(path)), Arena(str(path))
    for arena in (first, second):
        arena.region("a", 100)
    assert second.lost("a", [0, 1]) == [0, 1]
    first.sign("a", 0)
    assert second.lost("a", [0, 1]) == [1]
    first.close()
    assert second.lost("a", [0, 1]) == [0, 1]
    second.close()
