"""Ranks of several hosts: each listens at its own host's address, and they meet at the driver's
store.
"""

from __future__ import annotations

import contextlib
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hardpoint.errors import ConfigError, HardpointError
from hardpoint.rpc.network.hub import Hub, rendezvous_file
from hardpoint.rpc.network.listening import listening
from hardpoint_runtime.parallel.communicator import Meeting, TensorShape
from hardpoint_runtime.parallel.groups import Axis, Topology
from hardpoint_runtime.parallel.host import host_communicator
from hardpoint_runtime.parallel.network import meeting_data

HOSTS = ("127.0.0.2", "127.0.0.3")


@pytest.fixture
def meetings():
    """Make the meetings of two ranks, one a host."""
    hub = Hub(2, (1,), HOSTS[0])
    made = [rendezvous_file(hub.rendezvous_data(rank, HOSTS[rank])) for rank in range(2)]
    yield [Meeting(rank=rank, rendezvous=made[rank][1], timeout=60.0) for rank in range(2)]
    for fd, _ in made:
        os.close(fd)
    hub.close()


def both(function):
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, range(2)))


def test_two_groups_of_each_rank_meet_and_listen_at_their_hosts_alone(meetings):
    def run(rank):
        group = Topology(tensor=2).group_of(Axis.TENSOR, rank)
        line = Topology(pipeline=2).group_of(Axis.PIPELINE, rank)
        one, two = host_communicator(group, meetings[rank]), host_communicator(line, meetings[rank])
        total = one.all_reduce(torch.full((3,), float(rank + 1)))
        if rank == 0:
            two.send({"x": torch.arange(4)}, 1).wait()
            got = None
        else:
            got = two.receive({"x": TensorShape(shape=(4,), dtype=torch.int64)}, 0)["x"].tolist()
        where = {host for host, _ in listening(os.getpid())}
        two.barrier()
        one.close(), two.close()
        return total.tolist(), got, where

    (sum_0, _, seen), (sum_1, got, _) = both(run)
    assert sum_0 == sum_1 == [3.0] * 3
    assert got == [0, 1, 2, 3]
    assert set(HOSTS) >= seen, "something listens elsewhere"


JUNK = [b"\0" * 64, b"\xff" * 64, b"cos\nsystem\n(S'true'\ntR.", b"GET / HTTP/1.1\r\n\r\n"]


def test_strangers_at_the_collectives_ports_disturb_no_sum(meetings):
    def run(rank):
        group = Topology(tensor=2).group_of(Axis.TENSOR, rank)
        communicator = host_communicator(group, meetings[rank])
        if rank == 0:
            ports = sorted(listening(os.getpid()))
            strangers = [socket.create_connection(each, 30) for each in ports for _ in JUNK]
            for stranger, junk in zip(strangers, JUNK * len(ports), strict=True):
                with contextlib.suppress(OSError):
                    stranger.sendall(junk)
        sums = [communicator.all_reduce(torch.full((2,), float(rank + 1))).tolist() for _ in "abc"]
        if rank == 0:
            for stranger in strangers:
                stranger.close()
        sums.append(communicator.all_reduce(torch.ones(2)).tolist())
        communicator.close()
        return sums

    assert both(run) == [[[3.0, 3.0]] * 3 + [[2.0, 2.0]]] * 2


def test_shared_memory_across_hosts_is_refused(meetings):
    group = Topology(tensor=2).group_of(Axis.TENSOR, 0)
    with pytest.raises(ConfigError, match="for one host"):
        host_communicator(group, meetings[0], "shared_memory")


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\x80\x04"])
def test_a_rendezvous_that_is_none_is_refused(tmp_path, content):
    path = tmp_path / "rendezvous"
    path.write_bytes(content)
    with pytest.raises(HardpointError, match="cannot be read"):
        meeting_data(f"network:{path}")
