"""Who has no key comes in nowhere, and costs no more than the bounds."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

import pytest
import zmq
from hardpoint.rpc import channel
from hardpoint.rpc.channel import WorkerHandle
from hardpoint.rpc.network import gate as gates
from hardpoint.rpc.network.bounds import Bounds
from hardpoint.rpc.network.gate import Gate
from hardpoint.rpc.network.keys import KeyPair
from hardpoint.rpc.network.store import LONGEST_VALUE, Store
from hardpoint.rpc.zeromq.frames import CALL, HELLO, VALUE, Header

CANARY = b"cos\nsystem\n(S'touch /tmp/canary'\ntR."
GARBAGE = [
    b"",
    b"\0",
    b"GET / HTTP/1.1\r\n\r\n",
    CANARY,
    b"\xff\0\0\0\0\0\0\0\x01\x7f",  # the beginning of a ZMTP greeting, and no more
    b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00NULL" + bytes(48),  # a greeting without encryption
    b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00CURVE" + bytes(47) + b"\x06" + b"\xff" * 8,  # huge command
    os.urandom(4096),
]


def dealer(door, mechanism=None):
    """Connect a plain ZeroMQ socket; return it with its context."""
    context = zmq.Context()
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.IMMEDIATE, 1)
    if mechanism is not None:
        mechanism(made)
    made.connect(door.address)
    return made, context


def heard(door, seconds):
    with door.lock:
        return door.socket.recv_multipart(zmq.NOBLOCK) if door.socket.poll(seconds * 1000) else None


def curve(server, keys):
    def apply(made):
        made.setsockopt(zmq.CURVE_SERVERKEY, server.encode())
        made.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        made.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())

    return apply


@pytest.fixture
def gate():
    made = Gate(Bounds(handshake=1.0))
    yield made
    made.close()


@pytest.fixture
def door(gate):
    return gate.open("calls", "127.0.0.2")


def try_to_send(door, mechanism, seconds=0.6):
    """Return what the door hears of a peer within some seconds."""
    made, context = dealer(door, mechanism)
    try:
        if made.poll(int(seconds * 1000), zmq.POLLOUT):
            made.send(CANARY)
        return heard(door, seconds)
    finally:
        made.close()
        context.term()


def test_a_known_key_comes_in_and_is_known_by_its_owner(gate, door):
    keys = gate.keys_of(door, "3")
    made, context = dealer(door, curve(gate.keys.public, keys))
    made.send(b"hello")
    assert door.socket.poll(30_000)
    name, body = door.socket.recv_multipart(copy=False)
    assert body.bytes == b"hello"
    assert door.admits(name, 3)
    assert not door.admits(name, 2)
    made.close(), context.term()


def test_a_wrong_key_stays_outside(gate, door):
    gate.keys_of(door, "0")
    assert try_to_send(door, curve(gate.keys.public, KeyPair.make())) is None
    assert gate.refused >= 1


def test_a_key_of_another_door_stays_outside(gate, door):
    other = gate.open("control", "127.0.0.2")
    assert try_to_send(door, curve(gate.keys.public, gate.keys_of(other, "0"))) is None


def test_no_key_stays_outside(door):
    assert try_to_send(door, None) is None


def test_a_wrong_server_key_stays_outside(gate, door):
    keys = gate.keys_of(door, "0")
    assert try_to_send(door, curve(KeyPair.make().public, keys)) is None


def test_without_a_handler_not_even_a_known_key_comes_in(gate, door):
    keys = gate.keys_of(door, "0")
    assert try_to_send(door, curve(gate.keys.public, keys), 10.0) is not None  # the control
    gate.stop_handler()
    assert try_to_send(door, curve(gate.keys.public, keys)) is None


def test_plain_passwords_stay_outside(door):
    def plain(made):
        made.setsockopt(zmq.PLAIN_USERNAME, b"admin")
        made.setsockopt(zmq.PLAIN_PASSWORD, b"admin")

    assert try_to_send(door, plain) is None


def test_an_old_library_is_refused(monkeypatch):
    monkeypatch.setattr(zmq, "zmq_version_info", lambda: (4, 3, 4))
    with pytest.raises(Exception, match=r"4\.3\.5 is the oldest"):
        Gate()


def test_garbage_on_every_port_leaves_the_group_serving(make_group):
    group = make_group(1, (0,), start=False)
    for address in group.hub.addresses.values():
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        for junk in GARBAGE:
            with socket.create_connection((host, int(port))) as stranger:
                try:
                    stranger.sendall(junk)
                except OSError:
                    continue
    group.start(0)
    assert group.call("echo", 1) == [(0, "echo", (1,))]
    assert group.hub.end.refused == 0, "a stranger's frame was looked at"


def test_a_worker_cannot_speak_for_another(make_group, wait_until):
    group = make_group(2, (0, 1), start=False)
    data = group.hub.worker_data(0)["channel"] | {
        "name": group.hub.worker_data(1)["channel"]["name"]
    }
    thief = channel.attach(WorkerHandle(fds=(), data=data), 0)  # proves 0's key, says it is 1
    deadline = time.monotonic() + 30.0
    while group.hub.end.refused == 0 and time.monotonic() < deadline:
        with group.hub.end._lock:
            group.hub.end._read()
        time.sleep(0.01)
    assert group.hub.end.refused == 1
    assert group.hub.end._here == set()
    thief.close()


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [CANARY],
        [Header(CALL, 1, 1).pack()],
        [Header(HELLO).pack()[:-1]],
        [Header(VALUE, 9, 9, 0, 0).pack(), CANARY],
        [os.urandom(300)] * 9,
    ],
    ids=["none", "empty", "pickle", "call", "short", "stray value", "random"],
)
def test_frames_of_a_worker_that_lost_its_mind_fail_at_most_itself(make_group, frames):
    group = make_group(2, (0, 1), start=False)
    group.start(1)
    end = group.attach(0)
    for _ in range(3):
        end._socket.send_multipart(frames or [b""])
    group.workers.append(threading.Thread(target=group._serve, args=(end, 0), daemon=True))
    group.workers[-1].start()
    assert group.call("echo", 1) == [(0, "echo", (1,)), (1, "echo", (1,))]


def connected(made):
    try:
        made.getpeername()
    except OSError:
        return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="no filter on a port")
def test_strangers_that_say_nothing_close_the_door_for_a_moment_only(wait_until):
    gate = Gate(Bounds(handshake=60.0, half_open=16, crowded=60.0))
    door = gate.open("calls", "127.0.0.2")
    strangers = []

    def knock():
        strangers.append(socket.socket())
        strangers[-1].setblocking(False)
        strangers[-1].connect_ex(("127.0.0.2", door.port.number))
        return door.paused > 0

    try:
        wait_until(knock)  # how many come in until the door's thread looks is up to the machine
        assert sum(map(connected, strangers)) >= 16
        wait_until(lambda: not door.port.is_open)
        early = len(strangers)
        for _ in range(100):
            knock()
        time.sleep(0.1)
        assert not any(map(connected, strangers[early:]))
    finally:
        for made in strangers:
            made.close()
    wait_until(lambda: door.port.is_open)
    assert door.paused == 1
    keys = gate.keys_of(door, "0")
    assert try_to_send(door, curve(gate.keys.public, keys), 20.0) is not None
    gate.close()


def test_an_oversize_message_ends_its_connection_alone(make_group, wait_until):
    group = make_group(2, (0, 1), start=False, bounds=Bounds(largest=1 << 16))
    group.start(1)
    end = group.attach(0)
    end._socket.send_multipart([Header(VALUE, 1, 1, 0, 0).pack(), bytes(1 << 20)])
    wait_until(lambda: end._link.comes(0.0) or end._link.lost)
    assert end._link.lost
    end.close()
    with group.hub.end._lock:
        group.hub.end._read()
        assert all(len(frames[0]) <= 1 << 16 for _, _, frames in group.hub.end._inbox if frames)


def test_the_store_refuses_what_is_no_request():
    store = Store()
    for asked in ([], [b"get"], [b"set", b"k", b"v", b"x"], [b"run", b"k", b"v"],
                  [b"set", b"k" * 2000, b""], [b"set", b"k", bytes(LONGEST_VALUE + 1)],
                  [b"add", b"n", b"x"]):  # fmt: skip
        assert store.answer(asked)[0] == b"!"
    assert store.answer([b"get", b"k", b""]) == [b"-", b""]


def test_keys_are_in_no_repr(make_group):
    group = make_group(1, (0,), start=False)
    data = group.hub.worker_data(0)["channel"]
    handle = group.hub.end.worker_handle(0)
    shown = repr(handle) + repr(group.hub.gate.keys) + repr(KeyPair("p", data["secret"]))
    assert data["secret"] not in shown
    assert group.hub.gate.keys.secret not in shown
    assert gates.USER == "User-Id"
