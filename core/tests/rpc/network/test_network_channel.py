"""The channel to workers on other hosts, alone and beside shared memory."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import zmq
from hardpoint.errors import CallTimeoutError, ConfigError, EncodingError
from hardpoint.rpc import channel
from hardpoint.rpc.calls import Call, CallTable
from hardpoint.rpc.claims import Unclaimed
from hardpoint.rpc.control import ControlLane, ControlThread, Order, Sign
from hardpoint.rpc.network.addresses import explicit, split
from hardpoint.rpc.network.bounds import Bounds
from hardpoint.rpc.network.hub import Hub
from hardpoint.rpc.network.keys import KeyPair
from hardpoint.rpc.network.lanes import WorkerLane
from hardpoint.rpc.network.link import Link
from hardpoint.rpc.network.store import StoreClient


@pytest.mark.parametrize("remote", [(0, 1), (1,), (0, 2)], ids=["all", "one", "first and last"])
def test_every_rank_answers_and_replies_keep_their_ranks(make_group, remote):
    group = make_group(max(remote) + 1, remote)
    for number in range(20):
        answers = group.call("echo", number, "é", [1.5, None])
        assert answers == [
            (rank, "echo", (number, "é", [1.5, None])) for rank in range(group.world_size)
        ]


def test_all_workers_get_calls_of_several_threads_in_one_order(make_group):
    group = make_group(3, (2,))
    threads = [
        threading.Thread(target=lambda name=name: [group.call(name, i) for i in range(25)])
        for name in ("a", "b", "c")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(group.seen[0]) == 75
    assert group.seen[0] == group.seen[1] == group.seen[2]


def test_futures_complete_though_nobody_waits(make_group):
    group = make_group(2, (1,))
    futures = [group.call("echo", number, non_block=True) for number in range(30)]
    for number, future in enumerate(futures):
        assert future.result(30.0)[1] == (1, "echo", (number,))


def test_a_call_that_cannot_cross_reaches_no_worker(make_group):
    group = make_group(2, (1,))
    group.call("echo", 1)
    with pytest.raises(EncodingError):
        group.call("echo", print)
    group.call("echo", 2)
    assert [args for _, _, args in group.seen[0]] == [(1,), (2,)]


def test_what_is_too_large_is_refused_by_name_on_both_sides(make_group):
    group = make_group(2, (1,), bounds=Bounds(largest=1 << 16))
    with pytest.raises(EncodingError, match=r"'echo' carries .* takes 65536"):
        group.call("echo", bytes(1 << 17))
    with pytest.raises(Exception, match=r"'size' has .* takes 65536"):
        group.call("size", 1 << 17)
    assert len(group.call("echo", bytes(1 << 10))) == 2


def test_a_worker_that_does_not_read_holds_no_more_than_the_bound(make_group):
    group = make_group(2, (1,), bounds=Bounds(largest=1 << 20, queued=3 << 20))
    group.call("echo", 0)
    group.hold.clear()
    piece = bytes(1 << 19)
    group.call("echo", piece, non_block=True)  # it is in this one's receive(), and takes it
    with pytest.raises(CallTimeoutError, match="could not be sent in time"):
        [group.call("echo", piece, timeout=0.3, non_block=True) for _ in range(7)]
    assert group.hub.end._bytes <= 3 << 20
    group.hold.set()
    assert group.call("echo", 1)[1] == (1, "echo", (1,))
    assert group.seen[0] == group.seen[1], "what one of them has no room for, none gets"


def test_a_worker_is_told_of_the_drivers_end(make_group, wait_until):
    group = make_group(2, (0, 1))
    group.call("echo", 1)
    group.end.close()
    wait_until(lambda: not any(worker.is_alive() for worker in group.workers))


def test_nobody_comes_in_once_all_are_here(make_group):
    group = make_group(1, (0,))
    group.call("echo", 1)
    door = group.hub.gate._doors[0]
    assert not door.port.is_open
    late = channel.attach(channel.WorkerHandle(fds=(), data={
        **group.hub.worker_data(0)["channel"], "name": "00" * 20}), 0)  # fmt: skip
    assert late.receive(0.5) is None
    late.close()
    assert group.call("echo", 2) == [(0, "echo", (2,))]


def test_the_lane_carries_orders_reports_and_its_end():
    hub = Hub(1, (0,), "127.0.0.2")
    ended = threading.Event()
    lane = ControlLane(hub.lane(0))
    lane.order(Order.PING, 3)  # before the worker is there
    worker = WorkerLane(hub.worker_data(0)["lane"])
    control = ControlThread(worker.end, 0.05, orphaned=ended.set)
    control.start()
    reports, until = [], time.monotonic() + 30.0
    while not any(each.sign is Sign.PONG and each.number == 3 for each in reports):
        assert time.monotonic() < until
        reports += lane.reports()[0]
        time.sleep(0.01)
    lane.close()
    assert ended.wait(30.0)
    hub.close()
    worker.end.close()


def test_a_lane_ends_when_the_drivers_connection_does():
    hub = Hub(1, (0,), "127.0.0.2")
    ended = threading.Event()
    worker = WorkerLane(hub.worker_data(0)["lane"])
    ControlThread(worker.end, 0.05, orphaned=ended.set).start()
    hub.close()
    assert ended.wait(30.0)
    worker.end.close()


def test_a_link_to_where_nobody_listens_is_lost_at_once_and_not_waited_for():
    with socket.socket() as closed:
        closed.bind(("127.0.0.2", 0))
        keys = KeyPair.make()
        data = {"address": f"tcp://127.0.0.2:{closed.getsockname()[1]}", "public": keys.public,
                "server_key": keys.public, "secret": keys.secret,
                "peer_timeout": 30.0}  # fmt: skip
        context = zmq.Context()
        made = context.socket(zmq.DEALER)
        link = Link(made, data)
        assert not link.comes(60.0)
        assert link.lost
        link.close(), made.close(0), context.term()


def test_the_store_is_shared_by_all_members():
    hub = Hub(2, (1,), "127.0.0.2")
    one, two = (StoreClient(hub.rendezvous_data(rank, "x")["store"]) for rank in range(2))
    one.set(b"k", b"\0v")
    assert two.get(b"k") == b"\0v"
    assert two.get(b"none") is None
    assert [one.add(b"n", 2), two.add(b"n", 3)] == [2, 5]
    assert not one.wait([b"late"], 0.05)
    assert two.wait([b"k", b"n"], 30.0)
    assert two.delete(b"k")
    assert not one.delete(b"k")
    one.close(), two.close(), hub.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "*", "224.0.0.1", "no.such.host.invalid"])
def test_an_address_that_is_not_one_interface_is_refused(host):
    with pytest.raises(ConfigError):
        explicit(host)


def test_addresses_are_read_strictly():
    assert split("tcp://10.0.0.5:41") == ("10.0.0.5", 41)
    assert split("[::1]:41") == ("::1", 41)
    for wrong in ("10.0.0.5", ":4", "h:", "h:x", "h:65536", "h:²"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            split(wrong)


def test_across_hosts_a_call_that_was_sent_is_not_taken_back():
    table = CallTable()
    table.claims = Unclaimed()
    gather = table.open(Call(1, 0, "x", queued=True), 1)
    assert not gather.future.cancel()
    assert gather.future.running()
