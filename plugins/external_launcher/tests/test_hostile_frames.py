"""What comes by a line, a door or the store is used as what it must be, or ends that line alone."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time

import pytest
from hardpoint.errors import ConfigError, ExecutorFailedError
from hardpoint.rpc.network.hub import attach
from hardpoint.rpc.supervision import Supervisor
from hardpoint_external_launcher import abroad as network
from hardpoint_external_launcher.abroad import WINDOW, Abroad
from hardpoint_external_launcher.frames import HEADER, Frame, FrameError, Kind, Reading
from hardpoint_external_launcher.lines import Line
from hardpoint_external_launcher.peers import Peers
from hardpoint_external_launcher.presence import Presence
from hypothesis import example, given, settings
from hypothesis import strategies as st

PLACES = ("127.0.0.1", "127.0.0.2")
PATIENCE = 30.0

frames = st.builds(
    Frame,
    st.integers(0, 255),
    st.integers(0, 2**32 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.lists(st.binary(max_size=60), max_size=4),
)


@settings(deadline=None)
@given(st.lists(frames, max_size=6), st.lists(st.integers(1, 50), max_size=40))
def test_frames_are_the_same_in_whatever_pieces_they_come(sent, sizes):
    data = b"".join(bytes(piece) for frame in sent for piece in frame.pieces())
    reading, heard = Reading(), []
    for size in [*sizes, len(data)]:
        heard += reading.take(data[:size])
        data = data[size:]
    told = [(f.kind, f.call_id, f.generation, [bytes(p) for p in f.parts]) for f in heard]
    assert told == [(f.kind, f.call_id, f.generation, list(f.parts)) for f in sent]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=8))
@example([HEADER.pack(1, 65535, 0, 0, 0) + b"\xff" * 8 * 65535])
def test_no_bytes_are_more_than_frames_that_are_none(pieces):
    reading = Reading()
    with contextlib.suppress(FrameError):
        for piece in pieces:
            reading.take(piece)


def test_a_frame_that_says_it_is_huge_is_refused_before_it_comes():
    with pytest.raises(FrameError, match="at most"):
        Reading().take(HEADER.pack(Kind.VALUE, 1, 0, 1, 0) + (1 << 40).to_bytes(8, "little"))


@settings(deadline=None)
@given(st.one_of(st.binary(max_size=300), st.text(max_size=300).map(lambda t: t.encode())))
@example(b'{"offers": {}, "rank": NaN}')
@example(b"[" * 50_000)
@example(b'{"offers": {}, "rank": Infinity}')
def test_what_stands_in_the_store_is_a_presence_or_an_error(text):
    for secret in (b"", b"s"):
        with pytest.raises(ExecutorFailedError):
            Presence.of(1, text, secret)


def _peers(line):
    supervisor = Supervisor(2, time.monotonic(), missing=lambda call: (), heartbeat=30.0,
                            silent_after=600.0)  # fmt: skip
    return Peers(0, {1: line}, supervisor, 30.0)


@settings(deadline=None, max_examples=30)
@given(st.lists(frames.filter(lambda f: f.kind not in (Kind.LEAVE, Kind.HELLO)), max_size=20))
def test_frames_of_a_rank_that_lost_its_mind_leave_the_thread_hearing(sent):
    """Even where the part of the program that takes frames raises at each."""
    line = Line(1)
    peers, failed, left = _peers(line), [], threading.Event()

    def take(rank, frame):
        raise ValueError(frame.kind)

    peers.on_frame, peers.on_fail = take, failed.append
    peers.on_left = lambda rank, reason: left.set()
    peers.start()
    try:
        for frame in [*sent, Frame(Kind.LEAVE, parts=[b"done"])]:
            for piece in frame.pieces():
                view = memoryview(piece)
                while view:
                    view = view[os.write(line.offer, view) :]
        assert left.wait(PATIENCE), "the control: what came after it was heard"
        assert not failed
    finally:
        peers.close()


# Between hosts.


class Pair:
    """Two ranks on two addresses, with a line between them."""

    def __init__(self):
        self.sides = [Abroad((PLACES[0], 1), place, 10.0) for place in PLACES]
        self.lines = [Line(1), Line(0)]
        doors = {rank: side.door for rank, side in enumerate(self.sides)}
        for rank, side in enumerate(self.sides):
            side.begin(rank, doors, {1 - rank: self.lines[rank]})

    def read(self, side, count):
        """Take ``count`` bytes of what a side hears."""
        fd, data = self.lines[side]._read, bytearray()
        poll, end = select.poll(), time.monotonic() + PATIENCE
        poll.register(fd, select.POLLIN)
        while len(data) < count:
            assert poll.poll(1000) or time.monotonic() < end
            with contextlib.suppress(BlockingIOError):
                part = os.read(fd, 1 << 18)
                assert part, "the line has ended"
                data += part
        return bytes(data)

    def ended(self, side):
        """Wait for the end of what a side hears."""
        fd, end = self.lines[side]._read, time.monotonic() + PATIENCE
        while True:
            assert time.monotonic() < end
            with contextlib.suppress(BlockingIOError):
                if not os.read(fd, 1 << 18):
                    return
            time.sleep(0.01)

    def write(self, side, data):
        """Write all of it, waiting for room."""
        view, fd = memoryview(data), self.lines[side]._write
        end = time.monotonic() + 4 * PATIENCE
        while view:
            assert time.monotonic() < end, "nobody takes it"
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                time.sleep(0.002)

    def close(self):
        for line in self.lines:
            line.close()
        for side in self.sides:
            side.close()


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.close()


def test_a_rank_abroad_that_does_not_read_holds_no_more_than_the_window(pair):
    payload = os.urandom(3 * WINDOW)
    writer = threading.Thread(target=pair.write, args=(0, payload), daemon=True)
    writer.start()
    way, end = pair.sides[0]._ways[1], time.monotonic() + PATIENCE
    while way.sent + network.READ <= WINDOW:
        assert time.monotonic() < end, "it was never full"
        time.sleep(0.01)
    for _ in range(50):  # turns of both threads, in which more could be sent
        pair.write(1, b"the other way is free")
        assert pair.read(0, 21) == b"the other way is free"
        assert way.sent <= WINDOW
    assert len(pair.sides[1]._ways[0].untaken) <= WINDOW
    assert writer.is_alive(), "who sends waits for who does not read"
    assert pair.read(1, len(payload)) == payload
    writer.join(PATIENCE)
    assert not writer.is_alive()


def test_an_address_of_another_host_is_named_by_its_key():
    with pytest.raises(ConfigError, match=r"plugins\.external_launcher\.address = '192\.0\.2\.1'"):
        Abroad((PLACES[0], 1), "192.0.2.1", 10.0)


def test_what_was_said_last_arrives_and_then_the_end(pair):
    pair.write(1, b"x" * 100_000)
    pair.lines[1].close()
    pair.sides[1].close()
    assert pair.read(0, 100_000) == b"x" * 100_000
    pair.ended(0)


@pytest.mark.parametrize(
    "parts",
    [[b"d", bytes(1000)], [b"?"], [b""], [b"t", b"short"], [b"t", b"\xff" * 8], [b"e"]],
    ids=["data", "unknown", "empty", "short", "too much taken", "end"],
)
def test_another_connection_of_a_rank_is_not_its_line(pair, parts):
    pair.write(1, b"here")
    assert pair.read(0, 4) == b"here"
    with way_of(pair) as stranger:
        for _ in range(3):
            stranger.send_multipart(parts)
        stranger.send_multipart([b"get", b"k", b""])  # the control: what it said before was heard
        assert stranger.poll(30_000)
        assert stranger.recv_multipart() == [b"-", b""]
    assert not pair.sides[0]._ways[1].ended
    pair.write(1, b"still")
    assert pair.read(0, 5) == b"still"


def test_a_rank_that_sends_more_than_was_agreed_ends_its_line(pair):
    pair.write(1, b"here")
    assert pair.read(0, 4) == b"here"
    greedy = pair.sides[1]
    greedy._may_read = lambda way: way.here and way.reader >= 0 and not way.unsent
    with contextlib.suppress(BrokenPipeError):
        pair.write(1, bytes(3 * WINDOW))
    pair.ended(0)
    pair.ended(1)


@contextlib.contextmanager
def way_of(pair):
    """Connect once more with the keys of rank 1."""
    data = pair.sides[1].towards(pair.sides[0].door) | {"largest": 1 << 20}
    pair.sides[0]._door.port.open()
    end = attach(data, 0)
    try:
        yield end._socket
    finally:
        end.close()
