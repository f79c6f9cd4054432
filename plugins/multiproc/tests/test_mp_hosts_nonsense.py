"""Whatever the other side says, a leader goes on serving, and a follower ends with an error."""

from __future__ import annotations

import os
import pickle
import threading

import pytest
from hardpoint.errors import HardpointError
from hardpoint.rpc.network import key_file
from hardpoint.rpc.network.bounds import Bounds
from hardpoint.rpc.network.gate import Gate
from hardpoint.rpc.network.hub import codec_across
from hardpoint_multiproc.hosts import handshake
from hardpoint_multiproc.hosts.follower import Follower, LeaderLostError
from hardpoint_multiproc.hosts.handshake import installation
from hardpoint_multiproc.hosts.leader import Hosts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LEADER, OTHER = "127.0.0.2", "127.0.0.3"
CANARY = pickle.dumps(ValueError)

plain = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(allow_nan=False),
                  st.text(max_size=8), st.binary(max_size=8))  # fmt: skip
values = st.recursive(
    plain,
    lambda each: (
        st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=4), each, max_size=3)
    ),
    max_leaves=6,
)
keys = st.sampled_from(
    ["pid", "exit", "reason", "data", "text", "why", "node_rank", "host", "installation",
     "address", "files", "packet", "signal", "last"]
)  # fmt: skip
ranks = st.one_of(st.integers(0, 3), plain)


def messages(*ops):
    known = st.builds(
        lambda op, rank, rest: {**rest, "rank": rank, "op": op},
        st.sampled_from(ops),
        ranks,
        st.dictionaries(keys, values, max_size=6),
    )
    return st.lists(st.one_of(known, values, st.binary(max_size=60)), min_size=1, max_size=6)


def data_of(codec, message):
    if isinstance(message, bytes):
        return message
    return bytes(codec.encode(message, "it").data)


class Nursery:
    """What the leader's side needs of a nursery while nothing is started."""

    pid = exit = output = None

    def __init__(self):
        self.loop, self.told = self, []

    def listen(self, heard, died):
        self.heard = heard

    def call(self, function):
        self.told.append(function)

    def close(self, within):
        pass


@pytest.fixture(scope="module")
def leader():
    made = key_file.JoinKeys.make()
    own = installation([], [("dtype", "auto")])
    hosts = Hosts(Nursery(), made, (LEADER, 0), handshake.split(3, 3), own, heartbeat=30.0,
                  bounds=Bounds(peer_timeout=600.0))  # fmt: skip

    def follower(node_rank):
        return Follower((LEADER, int(hosts.address.rpartition(":")[2])), made, own,
                        node_rank=node_rank, address=OTHER, peer_timeout=600.0,
                        start="plain")  # fmt: skip

    joined, stranger = follower(1), follower(None)
    joined.join(30.0)
    yield hosts, joined, stranger
    joined.close(), stranger.close(), hosts.close(0.0)


@pytest.fixture
def unpickled(monkeypatch):
    """Note each use of an unpickler in this process."""
    used = []
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *a, **k: used.append(a))
    yield used
    pickle.loads(CANARY)
    assert len(used) == 1, "nothing was unpickled, and the control, which was, is seen"


@settings(max_examples=60, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(said=messages("started", "exited", "failed", "lines", "stack", "beat", "hello", "x"))
def test_a_leader_serves_whatever_followers_say(leader, unpickled, said):
    """From one that has joined, and from one that has the key and has not."""
    hosts, joined, stranger = leader
    for each in (joined, stranger):
        for message in [*said, CANARY]:
            each._socket.send(data_of(hosts._codec, message))
        each._socket.send_multipart([b"two", b"frames"])
    # The control: what a follower asks after all that is answered.
    hello = {"op": "hello", "installation": stranger._own.told(), "node_rank": 77,
             "address": OTHER, "host": "the control"}  # fmt: skip
    stranger._put(hello)
    while True:
        assert stranger._link.comes(30.0)
        answer = stranger._next()
        assert answer["op"] == "refused"
        if "node rank 77 of the control" in answer["reason"]:
            break
    assert hosts._nodes[1].name == joined._link._socket.getsockopt(5)  # ROUTING_ID
    told = [each.args[0] for each in hosts.nursery.told if isinstance(each.args[0], dict)]
    assert {each["rank"] for each in told} <= {1}, "a follower speaks of its own workers alone"


@settings(max_examples=25, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(said=messages("signal", "stack", "beat", "x", "welcome", "files"))
def test_a_follower_ends_in_order_or_with_an_error_whatever_the_leader_says(unpickled, said):
    made, codec = key_file.JoinKeys.make(), codec_across()
    gate = Gate(Bounds(), made.leader)
    door = gate.open("join", LEADER)
    door.admit(made.follower.public, "follower")
    follower = Follower((LEADER, door.port.number), made, installation([], []), node_rank=None,
                        address=OTHER, peer_timeout=60.0, start="plain")  # fmt: skip
    ended = []

    def run():
        try:
            follower.join(30.0)
            follower.run()
        except HardpointError as error:
            ended.append(error)
        else:
            ended.append(None)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert door.socket.poll(30_000)
        name, _ = door.socket.recv_multipart()
        welcome = {"op": "welcome", "node_rank": 1, "ranks": [1], "heartbeat": 30.0}
        for message in [welcome, *said, {"op": "stop"}]:
            door.socket.send_multipart([name, data_of(codec, message)])
        thread.join(30.0)
        assert not thread.is_alive()
        assert len(ended) == 1
        assert follower._nursery is None
    finally:
        follower.close()
        gate.close()


def test_a_follower_that_talks_nonsense_has_no_effect(eventually):
    keys = key_file.JoinKeys.make()
    own = installation([], [("dtype", "auto")])
    nursery = Nursery()
    hosts = Hosts(nursery, keys, (LEADER, 0), handshake.split(3, 3), own, heartbeat=0.1,
                  bounds=Bounds())  # fmt: skip
    codec = codec_across()
    host, port = LEADER, int(hosts.address.rpartition(":")[2])

    def follower(node_rank=None):
        return Follower((host, port), keys, own, node_rank=node_rank, address=OTHER,
                        peer_timeout=30.0, start="plain")  # fmt: skip

    mad, sane = follower(), follower(2)
    hello = {"op": "hello", "installation": own.told(), "node_rank": None, "address": "x",
             "host": "mad"}  # fmt: skip
    said = [
        b"", b"\x80\x04N.", os.urandom(500), b"\xc1" * 9, b"\x91" * 3000,
        *(bytes(codec.encode(each, "it").data) for each in (
            None, [], {}, {"op": None}, {"op": "started", "rank": 0}, {"op": "exited"},
            hello | {"node_rank": "one"},
            hello | {"node_rank": 0}, hello | {"node_rank": -1}, hello | {"node_rank": 99},
            hello | {"installation": {}}, hello | {"installation": own.told() | {"plugins": 3}},
            {"op": "leaving", "why": "x"}, {"op": "lines", "rank": 1, "data": b"x" * 1000},
        )),
    ]  # fmt: skip
    for data in said:
        mad._socket.send(data)
    mad._socket.send_multipart([b"two", b"frames"])
    sane.join(30.0)
    assert sane.ranks == [2]
    for _ in range(3):  # what it said of its place was understood
        assert mad._link.comes(30.0)
        assert mad._next()["op"] == "refused"
    mad.join(30.0)
    assert mad.ranks == [1]
    for rank in (2, "x", 1):  # of another's worker, of none, and at last of its own
        mad._put({"op": "exited", "rank": rank, "pid": 7})
    mad._put({"op": "lines"})
    hosts.await_followers(30.0, "key")

    def passed_on():
        return [call.args[0] for call in nursery.told if isinstance(call.args[0], dict)]

    eventually(lambda: any(each["rank"] == 1 for each in passed_on()))
    assert [each["rank"] for each in passed_on()] == [1]
    mad.close(), sane.close()
    hosts.close(0.0)


def test_a_leader_that_says_nothing_is_given_up_though_its_connection_lives():
    """As one whose thread hangs: that of its library answers for it."""
    made = key_file.JoinKeys.make()
    gate = Gate(Bounds(), made.leader)
    door = gate.open("join", LEADER)
    door.admit(made.follower.public, "follower")
    follower = Follower((LEADER, door.port.number), made, installation([], []), node_rank=None,
                        address=OTHER, peer_timeout=2.0, start="plain")  # fmt: skip

    def welcome():
        assert door.socket.poll(30_000)
        name, _ = door.socket.recv_multipart()
        answer = {"op": "welcome", "node_rank": 1, "ranks": [1], "heartbeat": 30.0}
        door.socket.send_multipart([name, data_of(codec_across(), answer)])

    thread = threading.Thread(target=welcome)
    thread.start()
    try:
        follower.join(30.0)
        thread.join()
        with pytest.raises(LeaderLostError, match="was not heard for"):
            follower.run()
        assert not follower._link.lost, "the control: the connection is there"
    finally:
        follower.close()
        gate.close()
