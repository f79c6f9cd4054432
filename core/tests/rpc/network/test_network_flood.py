"""Thousands of strangers cost no more than the bounds, and keep nobody from joining."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from hardpoint.rpc.network.bounds import Bounds

FLOOD = Path(__file__).with_name("flood.py")
HOST = "127.0.0.2"
STRANGERS = 4000
ROOM = 1500
"""Connections that may be open at once: how many come in until a door is shut is up to the machine,
but they are no thousands.
"""


@pytest.fixture
def flood():
    made = []

    def begin(count, addresses):
        places = [address.removeprefix("tcp://") for address in addresses]
        process = subprocess.Popen(
            [sys.executable, str(FLOOD), str(count), *places],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        made.append(process)
        return process

    yield begin
    for process in made:
        process.communicate(timeout=60)


@pytest.mark.skipif(sys.platform != "linux", reason="no filter on a port")
def test_members_join_through_a_flood_that_costs_no_more_than_the_bounds(
    make_group, flood, wait_until
):
    group = make_group(2, (0, 1), start=False, bounds=Bounds())
    own = psutil.Process()
    before, memory = own.num_fds(), own.memory_info().rss
    strangers = flood(STRANGERS, group.hub.addresses.values())
    doors = group.hub.gate._doors
    most = 0

    def crowded():
        nonlocal most
        most = max(most, own.num_fds() - before)
        return all(door.paused for door in doors)

    wait_until(crowded)
    group.start(0)  # in the midst of it
    assert int(strangers.stdout.readline()) > 0, "the control: some came in"
    crowded()
    group.start(1)
    assert group.call("echo", 1) == [(0, "echo", (1,)), (1, "echo", (1,))]
    crowded()
    assert most <= ROOM, "descriptors are bounded"
    assert own.memory_info().rss - memory < 256 << 20
    assert group.hub.end.refused == 0, "of no stranger a frame was looked at"
    # Who says nothing more is gone after the time that a handshake may take.
    wait_until(lambda: own.num_fds() - before < 64)


CHURN = """
import itertools, os, select, socket, struct, sys
RESET = struct.pack("ii", 1, 0)
SAID = (b"", b"\\xff", b"\\xff" + bytes(8) + b"\\x7f", os.urandom(2000))
places = [word.rpartition(":") for word in sys.argv[1:]]
tried = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    for number in range(100):
        host, _, port = places[number % len(places)]
        with socket.socket() as one:
            one.settimeout(0.2)
            try:
                one.connect((host, int(port)))
                one.send(SAID[number % 4])
                if number % 3 == 0:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                tried += 1
            except OSError:
                pass
    print(tried, flush=True)
"""


def test_members_join_and_work_among_strangers_that_come_again_for_ever(make_group, wait_until):
    group = make_group(2, (0, 1), start=False, bounds=Bounds())
    own = psutil.Process()
    before, memory = own.num_fds(), own.memory_info().rss
    places = [address.removeprefix("tcp://") for address in group.hub.addresses.values()]
    with tempfile.TemporaryFile("a+") as said:
        churn = subprocess.Popen(
            [sys.executable, "-c", CHURN, *places], stdin=subprocess.PIPE, stdout=said
        )

        def came():
            said.seek(0)
            return int(["0", *said.read().split("\n")[:-1]][-1])

        try:
            wait_until(lambda: came() >= 300, 120.0)
            group.start(0)  # in the midst of it
            seen = came()
            wait_until(lambda: came() > seen, 120.0)
            group.start(1)
            for number in range(20):
                assert group.call("echo", number)[1] == (1, "echo", (number,))
            assert own.num_fds() - before < ROOM
            assert own.memory_info().rss - memory < 256 << 20
            assert group.hub.end.refused == 0, "of no stranger a frame was looked at"
        finally:
            churn.communicate(b"end")
    wait_until(lambda: own.num_fds() - before < 64)


def accepted(port):
    """Return descriptors of this process for connections that came in by a port."""
    found = {}
    for name in [link.name for link in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):
            copy = os.dup(int(name))
            try:
                with socket.socket(fileno=copy) as connection:
                    copy = -1
                    tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                    if tcp and connection.getsockname()[1] == port:
                        found[int(name)] = connection.getpeername()[1]
            finally:
                if copy >= 0:
                    os.close(copy)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="it asks Linux what was received")
def test_only_who_has_proven_nothing_is_sent_away(make_group, wait_until):
    group = make_group(1, (0,))
    assert group.call("echo", 1) == [(0, "echo", (1,))]
    port = group.hub.gate._doors[0].port
    (member,) = accepted(port.number)
    port.open()
    with socket.create_connection((HOST, port.number)) as stranger:
        stranger.settimeout(30.0)
        stranger.sendall(b"\xff" + bytes(8) + b"\x7f")
        own = stranger.getsockname()[1]
        wait_until(lambda: own in accepted(port.number).values())
        (its,) = [fd for fd, peer in accepted(port.number).items() if peer == own]
        near, far = socket.socketpair()
        with tempfile.TemporaryFile() as file, near, far:
            for fd in (its, member, stranger.fileno(), file.fileno(), near.fileno(), 999_999):
                port.hang_up(fd)
            near.send(b"still")
            assert far.recv(10) == b"still"
        while stranger.recv(1000):
            pass
    assert group.call("echo", 2) == [(0, "echo", (2,))], "the member is as it was"


def test_a_stranger_has_so_many_seconds_and_a_member_stays(make_group):
    group = make_group(1, (0,), bounds=Bounds(handshake=0.5))
    assert group.call("echo", 1) == [(0, "echo", (1,))]
    port = group.hub.gate._doors[0].port
    port.open()
    for said in (b"", b"\xff" + bytes(8) + b"\x7f"):
        with socket.create_connection((HOST, port.number)) as stranger:
            stranger.settimeout(15.0)  # half of what the library gives by itself
            stranger.sendall(said)
            while stranger.recv(1000):  # its own greeting, then the end
                pass
    assert group.call("echo", 2) == [(0, "echo", (2,))]
