"""Strangers where the ranks meet: none gets a byte read, and none keeps the ranks from meeting."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hardpoint.rpc.network import key_file
from hardpoint.rpc.network.listening import listening
from hardpoint.rpc.network.store import LONGEST_VALUE, StoreLostError
from hardpoint_external_launcher import host_store
from hardpoint_external_launcher.host_store import (
    ForeignError,
    HostStore,
    HostStoreClient,
    packed,
    unpacked,
)
from hardpoint_external_launcher.launchers import seat_of
from hardpoint_external_launcher.named_store import NamedStore
from hardpoint_external_launcher.places import HostPlace
from hypothesis import example, given, settings
from hypothesis import strategies as st

FLOOD = Path(__file__).parents[3] / "core" / "tests" / "rpc" / "network" / "flood.py"
NOBODY = 65534
STRANGERS = 3000
ROOM = 1500
"""Connections that may be open at once while strangers come as fast as they can."""
GARBAGE = (b"\0" * 64, os.urandom(4096), b"\xff" * 16, b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04.")


@pytest.fixture
def name():
    return f"hardpoint-test-{os.getpid()}-{os.urandom(8).hex()}"


def visitor(name):
    """Return a connection of this user that says what it likes."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(30.0)
    made.connect(f"\0{name}")
    return made


def test_another_users_processes_are_turned_away_before_a_byte_is_read(name):
    with contextlib.closing(HostStore(name, user=os.geteuid() + 1)) as store:
        with contextlib.closing(HostStoreClient(name)) as client:
            with pytest.raises(StoreLostError):
                client.set(b"k", b"v")
            with visitor(name) as stranger:
                assert stranger.recv(1) == b""
        assert store.turned_away == 2
        assert not store._store._values
    with contextlib.closing(HostStore(name)) as store:  # the control
        with contextlib.closing(HostStoreClient(name)) as client:
            client.set(b"k", b"v")
            assert client.get(b"k") == b"v"
        assert store.turned_away == 0


def test_a_store_of_another_user_is_not_believed(name, monkeypatch):
    with contextlib.closing(HostStore(name)):
        monkeypatch.setattr(host_store, "peer_of", lambda connection: (1, os.geteuid() + 1))
        with pytest.raises(ForeignError):
            HostStoreClient(name)


def test_nobody_waits_for_who_says_half_a_request_or_nothing_or_too_much(name):
    huge = struct.pack("<BI", 3, 1 << 31)
    with contextlib.closing(HostStore(name)) as store, contextlib.ExitStack() as held:
        for said in (b"", b"\x03", struct.pack("<BI", 3, 100) + b"half") * 40:
            held.enter_context(visitor(name)).sendall(said)
        for said in (huge, b"\xff" * 100):
            with visitor(name) as stranger:
                stranger.sendall(said)
                assert stranger.recv(1) == b"", "it is sent away at once"
        client = held.enter_context(contextlib.closing(HostStoreClient(name)))
        client.set(b"k", bytes(LONGEST_VALUE))
        assert client.get(b"k") == bytes(LONGEST_VALUE), "the control"
        with pytest.raises(StoreLostError, match="refused"):
            client.set(b"k", bytes(LONGEST_VALUE + 1))
        with visitor(name) as greedy:  # asks, and takes nothing
            greedy.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                for _ in range(10_000):
                    greedy.sendall(packed([b"get", b"k", b""]))
            assert client.add(b"n", 2) == 2
        assert len(store._visitors) >= 100


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=3), st.binary(max_size=40))
@example([], b"")
def test_requests_come_apart_as_they_were_put_together(parts, more):
    data = packed(parts)
    assert unpacked(data + more) == (parts, len(data))
    for length in range(len(data)):
        assert unpacked(data[:length]) is None


def test_a_seat_is_taken_in_the_hosts_store_as_in_torchs(name):
    with contextlib.closing(HostStore(name)), contextlib.closing(HostStoreClient(name)) as client:
        store = NamedStore(client)
        assert store.compare_set("seat", "", "first") == b"first"
        assert store.compare_set("seat", "", "second") == b"first"
        assert store.compare_set("seat", "first", "second") == b"second"
        assert store.check(["seat"])
        assert not store.check(["seat", "other"])
        assert store.get("other") == b""


# Real ranks.


class Crowd:
    """Strangers, as a program: ``count`` connections that say little, held until the end."""

    def __init__(self, count, port):
        self.process = subprocess.Popen(
            [sys.executable, str(FLOOD), str(count), f"127.0.0.1:{port}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def came(self):
        return int(self.process.stdout.readline())

    def end(self):
        self.process.communicate(timeout=120)


def say(port, *words):
    for word in words:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 30) as one:
            one.sendall(word)


@pytest.mark.slow
def test_ranks_meet_by_their_keys_through_a_flood(launch, tmp_path):
    """S1 and S9, before they meet, meanwhile and then; rank 0's handles and memory are bounded."""
    key_file.write(tmp_path / "key")
    setting = f'plugins.external_launcher.key_file="{tmp_path / "key"}"'
    ranks = launch("twice_with_a_gate", 3, setting, only=[0])
    own = psutil.Process(ranks.processes[0].pid)
    place = ("127.0.0.1", ranks.port)
    launch.settle(lambda: place in listening(own.pid))
    fds, memory = own.num_fds(), own.memory_info().rss
    most = 0

    def crowded(count):
        nonlocal most
        most = max(most, own.num_fds() - fds)
        return most >= count

    say(ranks.port, *GARBAGE, b"\xff" * (1 << 20))
    crowd = Crowd(STRANGERS, ranks.port)
    try:
        launch.settle(lambda: crowded(100))
        ranks.start(1)  # in the midst of it
        assert crowd.came() > 0, "the control: some came in"
        say(ranks.port, *GARBAGE)
        ranks.start(2)
        for rank in range(3):
            launch.settle(lambda rank=rank: crowded(1 << 30) or "at gate" in ranks.out(rank))
        assert place not in listening(own.pid), "once all have met, nobody listens there"
    finally:
        crowd.end()
    assert most <= ROOM
    assert own.memory_info().rss - memory < 256 << 20
    for rank in range(3):
        ranks.processes[rank].stdin.write(b"go\n")
        ranks.processes[rank].stdin.flush()
    assert ranks.wait() == [0, 0, 0], [ranks.error(rank) for rank in range(3)]


PUSH = """
import os, socket, sys
if os.geteuid() == 0:
    os.setuid(int(sys.argv[3]))
held, came = [], 0
for number in range(int(sys.argv[1])):
    one = socket.socket(socket.AF_UNIX)
    one.settimeout(1.0)
    try:
        one.connect(chr(0) + sys.argv[2])
        one.send(bytes(number % 64))
        came += 1
    except OSError:
        pass
    held.append(one)
print(came, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_ranks_of_one_host_meet_where_no_network_leads_and_no_other_user_gets(launch):
    ranks = launch("steps", 3, only=[0])
    own = psutil.Process(ranks.processes[0].pid)
    name = HostPlace(seat_of(launch.module.variables(0, 3, ranks.port)))._name
    launch.settle(lambda: f"@{name}" in Path("/proc/net/unix").read_text())
    assert listening(own.pid) == set()
    fds = own.num_fds()
    strangers = subprocess.Popen(
        [sys.executable, "-c", PUSH, "800", name, str(NOBODY)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        ranks.start(1)
        assert int(strangers.stdout.readline()) > 0, "the control: they knocked"
        if os.geteuid() == 0:  # else they are as this user's ranks
            launch.settle(lambda: own.num_fds() - fds < 50)
        ranks.start(2)
        assert ranks.wait() == [0, 0, 0], [ranks.error(rank) for rank in range(3)]
    finally:
        strangers.communicate(timeout=120)
    assert ranks.out(0) == ranks.out(1) == ranks.out(2)


@pytest.mark.slow
def test_a_rank_that_strangers_keep_out_is_named_at_the_deadline(launch, tmp_path):
    """By another key file, say: it is a stranger, too."""
    for name in ("key", "other"):
        key_file.write(tmp_path / name)
    settings = "plugins.external_launcher.start_timeout=5.0"
    ranks = launch("steps", 2, settings, f'plugins.external_launcher.key_file="{tmp_path / "key"}"',
                   only=[0])  # fmt: skip
    ranks.command[-1] = f'plugins.external_launcher.key_file="{tmp_path / "other"}"'
    ranks.start(1)
    assert ranks.wait() == [1, 1]
    for rank in (0, 1):
        assert f"rank {1 - rank}: not come to 127.0.0.1:{ranks.port}, or with another" in (
            ranks.out(rank)
        )
    assert (tmp_path / "key").exists(), "a file that was there stays"
