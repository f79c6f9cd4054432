"""What listens where workers are on two nodes, and what frames of strangers do there (S1, S6)."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import threading
from pathlib import Path

import pytest
import zmq
from hardpoint.rpc.network.listening import listening
from hardpoint.rpc.typed_codec import UntypedError

pytestmark = pytest.mark.slow

HERE = "127.0.0.1"
KEYS = {"plugins.ray.strategy": "SPREAD", "plugins.ray.listen": HERE}
GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x01"
"""ZMTP's, up to the name of what protects the connection."""
HELD = 0.2
"""Seconds for which a stranger waits for an answer."""


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.fixture
def joined(nodes):
    """The connection to the two nodes, with all that Ray listens at in this process."""
    from hardpoint_ray import session
    from hardpoint_ray.settings import RaySettings

    opened = session.connect(RaySettings(address=nodes.address), {})
    yield listening(os.getpid())
    opened.close()


def frames(canary):
    """Return what strangers send, each on a connection of its own."""
    pickled = pickle.dumps(Canary(canary))
    null = GREETING + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
    curve = GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)
    message = b"\0" + bytes([min(len(pickled), 255)]) + pickled
    return [
        pickled,
        GREETING[:5],
        null + ready + message,
        null + ready + b"\x02" + struct.pack(">Q", 1 << 62),  # a length that nobody has
        curve + b"\x04\xc8\x05HELLO" + os.urandom(194),
        os.urandom(4096),
        b"GET / HTTP/1.1\r\n\r\n",
    ]


def send(places, canary):
    """Send all of that to each of ``places``, and a pickle by zmq without any key; return how many
    took a connection.
    """
    taken = 0
    for host, port in places:
        for data in frames(canary):
            try:
                with socket.create_connection((host, port), 30) as end:
                    taken += 1
                    end.settimeout(HELD)
                    end.sendall(data)
                    end.recv(1 << 16)
            except OSError:
                continue
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.sndtimeo = int(HELD * 1000)  # nothing can be sent while none is let in
            stranger.connect(f"tcp://{host}:{port}")
            with contextlib.suppress(zmq.Again):
                stranger.send(pickle.dumps(Canary(canary)))
            stranger.poll(int(HELD * 1000))
    return taken


class Strangers(threading.Thread):
    """Send to whatever this process begins to listen at, as soon as it does."""

    def __init__(self, known, canary):
        super().__init__(daemon=True)
        self.known, self.canary = set(known), canary
        self.taken = 0
        self.ended = threading.Event()

    def run(self):
        while not self.ended.wait(0.01):
            new = listening(os.getpid()) - self.known
            self.known |= new
            self.taken += send(new, self.canary)


def test_nothing_listens_but_what_is_told_and_strangers_have_no_effect(
    launcher, nodes, joined, tmp_path
):
    canary = tmp_path / "canary"
    strangers = Strangers(joined, canary)
    strangers.start()
    executor = launcher.start(workers=3, **KEYS, **{"plugins.ray.address": nodes.address})
    strangers.ended.set()
    strangers.join(120)
    assert not strangers.is_alive()
    assert strangers.taken  # while workers were still to come

    told = executor.listeners(executor.config, executor.registry, executor.platform)
    hub = executor._resources._hub
    ours = {(HERE, int(each.rpartition(":")[2])) for each in hub.addresses.values()}
    assert listening(os.getpid()) - joined == ours
    places = {each.purpose: each.address.rpartition(":")[0] for each in told}
    assert {each.purpose for each in told if each.owner == "driver"} == {"calls", "control"}
    assert (places["calls"], places["control"]) == (HERE, HERE)
    rays = [each for each in told if each.purpose == "Ray"]
    assert {each.owner for each in rays} == {"the Ray joined", "this process and each worker"}
    actors = executor._resources.nursery._actors.values()
    plain = plain_actor()
    for each in actors:  # the dummy's workers have no collective library
        assert len(listening(each.where.pid)) == plain, "a worker listens where Ray does, alone"

    assert send(ours, canary)
    with pytest.raises(UntypedError):  # what crosses nodes is data of known types
        executor.collective_rpc(lambda worker: worker.rank)
    assert executor.collective_rpc("supported_tasks") == [("generate", "embed")] * 3
    assert [each.rank for each in executor.check_health()] == [0, 1, 2]
    assert not canary.exists()
    pickle.loads(pickle.dumps(Canary(canary)))
    assert canary.exists()  # the control


def plain_actor():
    """Return at how many places an actor listens that has nothing of ours."""
    import ray

    class Plain:
        def pid(self):
            return os.getpid()

    actor = ray.remote(num_cpus=0)(Plain).remote()
    found = len(listening(ray.get(actor.pid.remote(), timeout=120)))
    ray.kill(actor)
    assert found
    return found
