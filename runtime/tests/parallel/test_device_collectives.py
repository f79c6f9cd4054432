"""A device's own collective library: what it is given, and that the host waits only where it says.

Ranks are threads over gloo, whose groups take a library's place; another group stands for one whose
operations never end.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from attrs import evolve
from hardpoint.errors import UnsupportedError
from hardpoint_runtime.accelerator import collectives
from hardpoint_runtime.accelerator.collectives import (
    DeviceCommunicator,
    device_communicator,
    process_groups,
)
from hardpoint_runtime.device import TorchDeviceOps
from hardpoint_runtime.parallel import process_group
from hardpoint_runtime.parallel.communicator import Meeting, TensorShape
from hardpoint_runtime.parallel.errors import CollectiveEndedError, CollectiveTimeoutError
from hardpoint_runtime.parallel.groups import Axis, Topology

PATIENCE = 60.0


class Library:
    """Makes groups of gloo, and notes what is asked of them."""

    def __init__(self):
        self.calls = []

    def __call__(self, store, index, size, timeout):
        return Watched(process_group.gloo(store, index, size, timeout), self.calls)


class Watched:
    def __init__(self, group, calls):
        self.group, self.calls = group, calls

    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self.group, name)


class Endless:
    """A group whose first ``done`` operations are done, and whose others never end."""

    def __init__(self, done=1):
        self.done = done
        self.aborted = 0

    def allreduce(self, tensors):
        self.done -= 1
        return Work(self.done >= 0)

    def broadcast(self, tensors, options):
        return Work(False)

    def abort(self):
        self.aborted += 1


class Work:
    def __init__(self, done):
        self.done = done
        self.ordered = False

    def wait(self, *arguments):
        assert not arguments, "a wait with a time would be the host's"
        self.ordered = True

    def is_completed(self):
        return self.done


def group_of(size, rank, axis=Axis.TENSOR):
    return evolve(Topology(tensor=size).group_of(Axis.TENSOR, rank), axis=axis)


def run(rendezvous, size, function, library, axis=Axis.TENSOR):
    def one(rank):
        meeting = Meeting(rank=rank, rendezvous=rendezvous, timeout=PATIENCE, spin=0.0)
        store = process_group.file_store(rendezvous.removeprefix("file://"))
        device = TorchDeviceOps("cpu", None)
        made = DeviceCommunicator(device, group_of(size, rank, axis), meeting, store, library)
        try:
            return function(made)
        finally:
            made.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def test_its_operations_give_what_those_of_other_communicators_give(rendezvous):
    def everything(made):
        mine = torch.full((2, 3), float(made.index + 1))
        total = made.all_reduce(mine.clone())
        joined = made.all_gather(mine[: made.index + 1], [1, 2])
        told = made.broadcast(mine.clone(), 1)
        made.barrier()
        if made.index == 0:
            made.send({"x": mine}, 1).wait()
            got = mine
        else:
            got = made.receive({"x": TensorShape(shape=(2, 3), dtype=mine.dtype)}, 0)["x"]
        made.barrier()  # gloo's sender needs its peer until it is told so
        return total, joined, told, got

    library = Library()
    for total, joined, told, got in run(rendezvous, 2, everything, library, Axis.PIPELINE):
        assert total.tolist() == [[3.0] * 3] * 2
        assert joined.tolist() == [[1.0] * 3, [2.0] * 3, [2.0] * 3]
        assert told.tolist() == [[2.0] * 3] * 2
        assert got.tolist() == [[1.0] * 3] * 2
    assert "abort" not in library.calls
    assert library.calls.count("shutdown") == 4  # all, and the pair, of two ranks


def endless(done=1, **meeting):
    group = Endless(done)
    made = DeviceCommunicator(
        TorchDeviceOps("cpu", None), group_of(2, 0), Meeting(rank=0, rendezvous="x", **meeting),
        process_group.distributed.HashStore(), lambda *arguments: group,
    )  # fmt: skip
    return made, group


def test_the_host_goes_on_while_the_device_waits_for_its_peers():
    made, _ = endless()
    assert made.all_reduce(torch.ones(3)).tolist() == [1.0] * 3


def test_what_is_received_lies_on_the_device():
    made, _ = endless()
    made._device.device = torch.device("meta")
    got = made.receive({"x": TensorShape(shape=(2, 3), dtype=torch.float32)}, 1)
    assert got["x"].device.type == "meta"


def test_a_barrier_waits_no_longer_than_it_may():
    made, group = endless(timeout=0.05)
    with pytest.raises(CollectiveTimeoutError, match="rank 1 did not come within"):
        made.barrier()
    assert group.aborted == 0
    made.close()


def test_ending_a_group_aborts_what_is_under_way():
    made, group = endless()
    made.end()
    assert group.aborted == 1
    with pytest.raises(CollectiveEndedError):
        made.all_reduce(torch.ones(1))
    made.close()


def test_an_operation_that_fails_is_a_collective_error(monkeypatch):
    made, group = endless()

    def fail(self, *arguments):
        raise RuntimeError("NET: connection closed by the peer\nmore")

    monkeypatch.setattr(Work, "wait", fail)
    with pytest.raises(process_group.PeerLostError, match="connection closed by the peer"):
        made.all_reduce(torch.ones(1))
    made.close()
    assert group.aborted == 1


def test_a_library_that_torch_was_built_without_is_named():
    with pytest.raises(UnsupportedError, match="communication by nothing: it was built without"):
        process_groups("nothing")


def test_groups_are_made_by_the_librarys_name_with_its_timeout(monkeypatch):
    seen = {}

    class ProcessGroupMINE:
        class Options:
            _timeout = None

        def __init__(self, store, index, size, options):
            seen.update(store=store, index=index, size=size, seconds=options._timeout.seconds)

    monkeypatch.setattr(
        collectives.distributed, "ProcessGroupMINE", ProcessGroupMINE, raising=False
    )
    process_groups("mine")("store", 1, 3, 40.0)
    assert seen == {"store": "store", "index": 1, "size": 3, "seconds": 40}


def test_ranks_of_several_hosts_go_through_host_memory_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(collectives, "host_communicator", Host)
    meeting = Meeting(rank=0, rendezvous="tcp://elsewhere")
    with caplog.at_level(logging.WARNING):
        made = device_communicator(TorchDeviceOps("cpu", None), group_of(2, 0), meeting, "mine")
    assert type(made).__name__ == "StagedCommunicator"
    assert "go through host memory" in caplog.text


class Host:
    def __init__(self, group, meeting):
        self.group, self.meeting = group, meeting
