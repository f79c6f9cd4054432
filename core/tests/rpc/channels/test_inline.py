"""The hot path, compiled and in Python: the same bytes, the same answers, message for message."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hardpoint.rpc import codec
from hardpoint.rpc.calls import Call, CallTable
from hardpoint.rpc.shared_memory import inline
from hardpoint.rpc.shared_memory.bell import Event, make_event
from hardpoint.rpc.shared_memory.inline import hot_path, why_not_native
from hardpoint.rpc.shared_memory.layout import (
    CLOSED,
    FAILURE,
    HEAD,
    NOTHING,
    VALUE,
    WRITER_CPU,
    WRITER_WAITS,
)
from hardpoint.rpc.shared_memory.memory import PAGE, Memory
from hypothesis import example, given, settings
from hypothesis import strategies as st

CAPACITY, LARGE, FLAGS_AT, TAIL = PAGE, 500, 40, 32
BOTH = [
    pytest.param(
        True, id="compiled", marks=pytest.mark.skipif(bool(why_not_native()), reason="not built")
    ),
    pytest.param(False, id="python"),
]


class Pair:
    """A writer and a reader of one ring, which begins after a page of words."""

    def __init__(self, native):
        self.parts = hot_path(native)
        self.memory = Memory.create(PAGE + CAPACITY)
        self.told = 0
        memory = self.memory.map
        self.writer = self.parts.InlineWriter(memory, PAGE, CAPACITY, FLAGS_AT, 3, LARGE)
        self.reader = self.parts.InlineReader(memory, PAGE, CAPACITY, TAIL, self.tell)

    def tell(self):
        self.told += 1
        self.memory.words[WRITER_WAITS] = 0

    def close(self):
        self.writer.release()
        self.reader.release()
        self.memory.close()


@pytest.fixture(params=BOTH)
def pair(request):
    with contextlib.closing(Pair(request.param)) as made:
        yield made


plain = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers()
    | st.text(max_size=40) | st.binary(max_size=LARGE - 1)
)  # fmt: skip
other = st.lists(plain, max_size=2) | st.binary(min_size=LARGE, max_size=LARGE + 9) | st.just((1,))
values = plain | other | st.tuples(plain, plain) | st.tuples(plain, other) | st.just(())


@pytest.mark.skipif(bool(why_not_native()), reason=why_not_native())
@settings(max_examples=150, deadline=None)
@given(
    kind=st.integers(1, 5),
    call_id=st.integers(0, 2**64 - 1),
    generation=st.integers(0, 2**32 - 1),
    rank=st.integers(-1, 2**31 - 1),
    name=st.binary(max_size=60),
    sent=st.lists(values, max_size=8),
)
def test_both_write_the_same_bytes_and_read_the_same_messages(
    kind, call_id, generation, rank, name, sent
):
    ids = (kind, call_id, generation, rank, name)
    with contextlib.closing(Pair(True)) as compiled, contextlib.closing(Pair(False)) as ours:
        for value in sent:
            done = ours.writer.put_plain(*ids, value)
            assert compiled.writer.put_plain(*ids, value) is done
            assert compiled.writer.head == ours.writer.head
        seen = compiled.memory.words[WRITER_CPU]
        assert bool(seen) == bool(ours.writer.head)
        compiled.memory.words[WRITER_CPU] = 0  # what Python cannot know
        assert compiled.memory.map[:] == ours.memory.map[:]
        while (message := ours.reader.take()) is not None:
            assert compiled.reader.take() == message
            assert compiled.reader.tail == ours.reader.tail
        assert compiled.reader.take() is None
        assert compiled.memory.map[:] == ours.memory.map[:]


def test_what_is_plain_arrives_and_what_is_not_is_left_to_others(pair):
    for value in (7, "text", b"bytes", None, (), (1, b"x")):
        assert pair.writer.put_plain(VALUE, 1, 2, 3, b"name", value) is True
        kind, call_id, generation, rank, name, data, apart = pair.reader.take()
        assert (kind, call_id, generation, rank, name, apart) == (VALUE, 1, 2, 3, b"name", ())
        assert codec.loads_plain(data) == value
    for value in ([], {}, bytes(LARGE), (1, []), ((1,),), type("Text", (str,), {})("x")):
        assert pair.writer.put_plain(VALUE, 1, 2, 3, b"name", value) is None
    assert pair.reader.take() is None


def test_there_is_room_up_to_the_edge_and_what_is_not_in_line_is_told(pair):
    pair.writer.edge = 64
    assert pair.writer.put(VALUE, 1, 0, 0, b"", bytes(41)) is False
    assert pair.writer.put(VALUE, 1, 0, 0, b"", memoryview(bytes(40))) is True
    assert pair.writer.put(VALUE, 2, 0, 0, b"", b"") is False
    pair.writer.edge = CAPACITY
    assert pair.writer.put_plain(VALUE, 1, 0, 0, b"", "x" * CAPACITY) is False
    pair.memory.words[WRITER_WAITS] = 1
    assert len(pair.reader.take()[5]) == 40
    assert pair.told == 1
    pair.memory.words[HEAD] += 64  # a frame of nothing but zeros
    assert pair.reader.take() is NotImplemented


def test_numbers_that_a_header_cannot_hold_are_refused(pair):
    for ids in ((256, 1, 0, 0), (VALUE, 2**64, 0, 0), (VALUE, 1, 2**32, 0), (VALUE, 1, 0, 2**31)):
        with pytest.raises((ValueError, OverflowError, struct.error)):
            pair.writer.put(*ids, b"", b"")
    assert pair.reader.take() is None


def test_who_sleeps_is_woken_once_and_nobody_else(pair):
    events = tuple(Event(make_event()) for _ in range(3))
    words = pair.memory.words

    def rung():
        found = []
        for number, event in enumerate(events):
            with contextlib.suppress(BlockingIOError):
                found.append((number, os.eventfd_read(event.fd)))
        return found

    try:
        for at in (FLAGS_AT - 1, FLAGS_AT + 3):
            words[at] = 1
        pair.writer.wake(events)
        assert rung() == []
        words[FLAGS_AT] = words[FLAGS_AT + 2] = 7
        pair.writer.wake(events)
        pair.writer.wake(events)
        assert rung() == [(0, 1), (2, 1)]
        assert list(words[FLAGS_AT - 1 : FLAGS_AT + 4]) == [1, 0, 0, 0, 1]
        os.eventfd_write(events[1].fd, 2**64 - 2)  # full: awake it is
        words[FLAGS_AT + 1] = 1
        pair.writer.wake(events)
        assert rung() == [(1, 2**64 - 2)]
        events[0].close()
        words[FLAGS_AT] = 1
        pair.writer.wake(events)
        words[FLAGS_AT + 1] = 1
        pair.writer.release()
        pair.writer.wake(events)
        assert words[FLAGS_AT + 1] == 1
    finally:
        for event in events:
            event.close()


def test_what_was_given_back_is_not_touched(pair):
    pair.close()
    for use in (
        lambda: pair.writer.put(VALUE, 1, 0, 0, b"", b""),
        pair.reader.take,
        lambda: pair.reader.next(0.0),
        lambda: pair.reader.sleep(-1, 0.0, FLAGS_AT),
    ):
        with pytest.raises(ValueError, match=r"released|given back"):
            use()


def test_a_wait_ends_with_a_frame_or_with_its_time_and_leaves_others_to_work(pair):
    began = time.monotonic()
    assert pair.reader.next(0.02) is None
    assert time.monotonic() - began >= 0.02
    thread = threading.Thread(target=pair.writer.put, args=(VALUE, 1, 0, 0, b"", b""))
    timer = threading.Timer(0.01, thread.start)
    timer.start()
    assert pair.reader.next(30.0)[0] == VALUE  # the other threads run meanwhile
    timer.join()
    thread.join()
    assert time.monotonic() - began < 30.0
    pair.writer.put(VALUE, 2, 0, 0, b"", b"")
    assert pair.reader.next(30.0)[1] == 2


@pytest.fixture
def event():
    fd = make_event()
    yield fd
    os.close(fd)


def test_a_sleep_ends_when_it_is_rung_and_says_what_for(pair, event):
    words = pair.memory.words
    assert pair.reader.sleep(event, 0.01, FLAGS_AT) is False
    assert words[FLAGS_AT] == 1  # it may be rung still

    def ring():
        while not words[FLAGS_AT]:
            time.sleep(0)
        words[FLAGS_AT] = 0
        os.eventfd_write(event, 1)

    for _ in range(3):
        words[FLAGS_AT] = 0
        thread = threading.Thread(target=ring)
        thread.start()
        assert pair.reader.sleep(event, 30.0, FLAGS_AT) is True
        thread.join()
        assert pair.reader.take() is None
    assert pair.reader.sleep(event, 0.01, FLAGS_AT) is False  # the last one is no longer counted


def test_nobody_sleeps_beside_a_frame_or_in_a_closed_ring(pair, event):
    words = pair.memory.words
    assert pair.writer.put(VALUE, 1, 0, 0, b"", b"")
    assert pair.reader.sleep(event, 3600.0, FLAGS_AT) is True
    assert words[FLAGS_AT] == 0
    assert pair.reader.take()[0] == VALUE
    words[CLOSED] = 1
    assert pair.reader.sleep(event, 3600.0, FLAGS_AT) is False
    os.eventfd_write(event, 1)
    words[CLOSED] = 0
    assert pair.reader.sleep(event, 3600.0, FLAGS_AT) is False  # rung for another reason


def test_a_signal_is_heard_in_a_sleep(pair, event):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        main = threading.main_thread().ident
        timer = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGUSR1))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pair.reader.sleep(event, 3600.0, FLAGS_AT)
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("native", BOTH)
def test_replies_of_all_rings_are_delivered_and_the_odd_one_is_named(native):
    pairs = [Pair(native) for _ in range(3)]
    rings = pairs[0].parts.ReplyRings(tuple(each.reader for each in pairs))
    got = []

    def deliver(*reply):
        got.append(reply)

    def put(rank, kind, call_id, data=b""):
        assert pairs[rank].writer.put(kind, call_id, 9, rank, b"", data)

    try:
        assert rings.ready() == 0
        assert rings.collect(deliver, None) == -1
        put(2, VALUE, 5, b"five")
        put(0, NOTHING, 6)
        put(0, VALUE, 7, b"seven")
        assert rings.ready() == 2
        assert rings.spin(30.0, 2) == 2
        assert rings.spin(0.001, 3) == 2
        assert rings.collect(deliver, None) == -1
        assert got == [(6, 0, 9, None, None), (7, 0, 9, b"seven", None), (5, 2, 9, b"five", None)]

        got.clear()
        put(1, VALUE, 8, b"eight")
        put(1, FAILURE, 9)
        assert rings.collect(deliver, None) == 1
        assert got == [(8, 1, 9, b"eight", None)]
        assert pairs[1].reader.take()[:2] == (FAILURE, 9)

        def refuse(*reply):
            raise KeyError(reply[0])

        put(0, VALUE, 10, b"ten")
        put(0, VALUE, 11, b"eleven")
        with pytest.raises(KeyError, match="10"):
            rings.collect(refuse, None)
        assert rings.collect(deliver, None) == -1
        assert got[1:] == [(11, 0, 9, b"eleven", None)]
    finally:
        for each in pairs:
            each.close()


def test_why_nothing_is_compiled_is_told(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "hardpoint.rpc.shared_memory._native", None)
    monkeypatch.setattr(inline, "__file__", str(tmp_path / "inline.py"))
    inline.why_not_native.cache_clear()
    try:
        assert "_native" in why_not_native()
        assert hot_path().InlineWriter is inline.InlineWriter
        inline.why_not_native.cache_clear()
        Path(tmp_path, "not_built.txt").write_text("there was no C compiler\n")
        assert why_not_native() == "there was no C compiler"
        inline.why_not_native.cache_clear()
        old = SimpleNamespace(INTERFACE=inline.INTERFACE - 1)
        monkeypatch.setitem(sys.modules, "hardpoint.rpc.shared_memory._native", old)
        assert "another version" in why_not_native()
        assert hot_path().InlineReader is inline.InlineReader
    finally:
        inline.why_not_native.cache_clear()


SEVEN = codec.dumps_plain(7, codec.PLAIN_VERSION)
gathers = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 3, 5, 6]),
        st.sampled_from([4, 4, 4, 5]),
        st.sampled_from([NOTHING, VALUE]),
    ),
    max_size=8,
)


@pytest.mark.parametrize("native", BOTH)
@settings(max_examples=40, deadline=None)
@given(
    sent=st.lists(gathers, min_size=3, max_size=3),
    contents=st.lists(
        st.sampled_from([b"", b"bad", SEVEN, SEVEN, b"\x80\x05K\x07."]), min_size=8, max_size=8
    ),
)
@example(sent=[[(1, 4, NOTHING), (3, 4, VALUE), (5, 4, VALUE)]] * 3, contents=[SEVEN] * 8)
@example(
    sent=[[(1, 4, VALUE)], [(5, 4, VALUE), (1, 4, VALUE)], [(1, 4, VALUE)]],
    contents=[b"bad", SEVEN],
)
def test_what_is_entered_at_once_ends_as_what_is_delivered(native, sent, contents):
    """Replies to open, finished, unknown and other generations' calls; doubled ones; bad ones."""
    tables = [CallTable(), CallTable()]
    pairs = [Pair(native) for _ in sent]
    rings = pairs[0].parts.ReplyRings(tuple(each.reader for each in pairs))
    found = []
    try:
        for table, direct in zip(tables, (False, True), strict=True):
            opened = [table.open(Call(number, 4, "m"), 3) for number in (1, 2, 3)]
            opened.append(table.open(Call(5, 4, "m", reply_rank=2), 3))
            table.expire(2)
            opened[2].held = ValueError()  # what rank 0 answered, but for another's failure
            opened[2].silent.remove(0)
            for rank, replies in enumerate(sent):
                for (number, generation, kind), value in zip(replies, contents, strict=False):
                    told = b"" if kind == NOTHING else value
                    assert pairs[rank].writer.put(kind, number, generation, rank, b"", told)
            assert rings.collect(table.acknowledge, table.calls if direct else None) == -1
            ends = [
                (each.ended, type(each._error), each._error is None and each._value, each.silent)
                for each in opened
            ]
            found.append((ends, table.late_replies, table.pending))
        assert found[0] == found[1]
    finally:
        for each in pairs:
            each.close()
