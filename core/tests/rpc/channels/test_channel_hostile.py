"""Strangers on the ZeroMQ socket, and handles that are not what they say."""

from __future__ import annotations

import os
import pickle
import random
import socket
import struct
import time
from types import SimpleNamespace

import pytest
import zmq
from attrs import evolve
from hardpoint.errors import UnsupportedError
from hardpoint.rpc import channel
from hardpoint.rpc.calls import Reply
from hardpoint.rpc.channel import THREAD, ChannelClosedError, WorkerHandle
from hardpoint.rpc.zeromq.frames import HELLO, VALUE, Header

PATIENCE = 60.0


@pytest.fixture
def canary(tmp_path):
    """Bytes that write a file when they are unpickled, and whether they have been."""

    class Canary:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path / 'fired'}",))

    return pickle.dumps(Canary()), (tmp_path / "fired").exists


@pytest.fixture
def group(make_group):
    return make_group("zmq", 2, near=True)


def path_of(group):
    return f"/proc/self/fd/{group.end.worker_handle(0).fds[0]}"


def raw(group, *parts):
    """Write bytes to the socket that the driver listens on; return whether it hung up."""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(path_of(group))
        stranger.settimeout(0.2)
        try:
            for part in parts:
                stranger.sendall(part)
            while stranger.recv(4096):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            return True
        return True


GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def test_noise_on_the_socket_has_no_effect(group, canary):
    data, fired = canary
    source = random.Random(5)
    raw(group, data)
    raw(group, source.randbytes(2000))
    raw(group, GREETING[:30])
    raw(group, GREETING, source.randbytes(500))
    raw(group, GREETING, b"\x04\x19\x05READY" + data)
    assert group.call("echo", 1) == [1, 1]
    assert not fired()


def test_nor_has_noise_before_the_workers_are_there(make_group, canary):
    data, fired = canary
    group = make_group("zmq", 2, start=False)
    source = random.Random(6)
    for noise in (data, source.randbytes(2000), GREETING[:30], GREETING + source.randbytes(500)):
        raw(group, noise)
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(f"ipc://{path_of(group)}")
            for rank in (0, 1):
                stranger.send(Header(HELLO, rank=rank).pack())
                stranger.send_multipart([Header(VALUE, 1, 1, 0, rank).pack(), data])
            for rank in (0, 1):
                group.start_thread(rank)
            deadline = time.monotonic() + PATIENCE
            while group.end.refused < 4 and time.monotonic() < deadline:
                assert group.call("rank_of") == [0, 1]
            assert not stranger.poll(200), "it got a call that was not for it"
    finally:
        context.term()
    assert group.end.refused >= 4
    assert group.call("rank_of") == [0, 1]
    assert not fired()


def test_a_frame_that_says_it_is_huge_is_refused_unread(group):
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    huge = b"\x02" + struct.pack(">Q", 1 << 62)
    before = memory()
    assert raw(group, GREETING, b"\x04" + bytes([len(ready)]) + ready, huge)
    assert memory() - before < 64 << 20
    assert group.call("echo", 2) == [2, 2]


def memory():
    with open("/proc/self/statm") as statm:  # noqa: PTH123
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_stranger_that_speaks_the_protocol_is_not_read(group, canary):
    data, fired = canary
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(f"ipc://{path_of(group)}")
            future = group.call("echo", 3, non_block=True)
            for number in range(1, 20):
                for rank in (0, 1):
                    header = Header(VALUE, number, number, 0, rank).pack()
                    stranger.send_multipart([header, data])
            stranger.send_multipart([b"", data])
            stranger.send_multipart([data] * 50)
            assert future.result(PATIENCE) == [3, 3]
            deadline = time.monotonic() + PATIENCE
            while group.end.refused < 40 and time.monotonic() < deadline:
                group.call("echo", 4)
    finally:
        context.term()
    assert group.end.refused >= 40
    assert group.call("echo", 5) == [5, 5]
    assert not fired()


def test_a_name_that_is_taken_cannot_be_taken_again(group):
    name = bytes.fromhex(group.end.worker_handle(0).data["name"])
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.setsockopt(zmq.ROUTING_ID, name)
            stranger.connect(f"ipc://{path_of(group)}")
            stranger.send(Header(HELLO).pack())
            assert group.call("rank_of") == [0, 1]
            assert not stranger.poll(200), "it got a call that was not for it"
    finally:
        context.term()
    assert group.call("rank_of") == [0, 1]


def test_a_worker_answers_for_itself_alone(make_group, kind):
    """Whatever rank a reply claims, it is its sender's."""
    group = make_group(kind, 2, start=False)
    ends = [group.attach(rank) for rank in (0, 1)]
    call = group.make("echo", 1, non_block=True)
    gather = group.table.open(call, 2)
    group.end.send(call)
    assert [end.receive(PATIENCE).call_id for end in ends] == [call.call_id] * 2
    for _ in range(3):
        ends[0].reply(Reply(call_id=call.call_id, rank=1, generation=0))
    assert not group.receiver.wait(gather, time.monotonic() + 0.2)
    assert group.table.missing(call.call_id) == [1]
    assert group.table.late_replies == 2
    ends[1].reply(Reply(call_id=call.call_id, rank=0, generation=0))
    assert group.receiver.wait(gather, time.monotonic() + PATIENCE)
    assert gather.result() == [None, None]
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    "data",
    [{}, {"kind": "nothing"}, {"kind": None}, {"kind": ["shared_memory"]}],
)
def test_a_handle_of_no_known_kind_is_refused(data):
    with pytest.raises(UnsupportedError, match="shared_memory, zmq"):
        channel.attach(WorkerHandle(fds=(), data=data), 0)


def test_a_handle_of_other_memory_is_refused(make_group):
    group = make_group("shared_memory", 2, start=False)
    handle = group.end.worker_handle(1)
    other = os.memfd_create("other")
    try:
        os.ftruncate(other, 4096)
        forged = evolve(handle, fds=(other, *handle.fds[1:]))
        with pytest.raises(UnsupportedError, match="4096 bytes"):
            channel.attach(forged, 1)
        with pytest.raises(UnsupportedError):
            channel.attach(evolve(handle, fds=handle.fds[:3]), 1)
        with pytest.raises(UnsupportedError):
            channel.attach(handle, 2)
    finally:
        os.close(other)


@pytest.mark.parametrize(
    ("machine", "kind"),
    [
        ("x86_64", "shared_memory"),
        ("i686", "shared_memory"),
        ("aarch64", "zmq"),
        ("riscv64", "zmq"),
    ],
)
def test_memory_is_not_shared_where_stores_have_no_order(monkeypatch, machine, kind):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=machine))
    assert channel.usual_kind() == kind
    if kind == "zmq":
        with pytest.raises(UnsupportedError, match=f"(?s){machine}.*Choose zmq"):
            channel.create("shared_memory", 1)


@pytest.mark.parametrize("waiting", [True, False])
def test_noise_in_a_reply_ring_fails_the_calls_by_name(make_group, tmp_path, waiting):
    group = make_group("shared_memory", 1, near=True)
    future = group.call("gate", tmp_path / "in", tmp_path / "open", non_block=True)
    group.end._memories[1].words[0] += 64  # a frame that nobody wrote
    if waiting:
        with pytest.raises(ChannelClosedError, match="not used any more"):
            group.call("echo", 1)
    else:
        group.end.wake(THREAD)
    assert isinstance(future.exception(PATIENCE), ChannelClosedError)
    (tmp_path / "open").touch()
