"""The rings by themselves: wrapping, room, fragments, blocks that are held, frames that lie."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
import weakref

import pytest
from hardpoint.errors import CallTimeoutError, EncodingError, UnsupportedError
from hardpoint.rpc.channel import ChannelClosedError
from hardpoint.rpc.shared_memory.bell import Event, make_event
from hardpoint.rpc.shared_memory.images import ANNOUNCED, Image, parts_of
from hardpoint.rpc.shared_memory.inline import hot_path, why_not_native
from hardpoint.rpc.shared_memory.layout import CALL, CLOSED, HEAD, SLOTS, RingLayout
from hardpoint.rpc.shared_memory.memory import Memory
from hardpoint.rpc.shared_memory.ring_reader import RingReader
from hardpoint.rpc.shared_memory.ring_writer import RingWriter
from hardpoint.rpc.shared_memory.slabs import KEEP_S
from hypothesis import given, settings
from hypothesis import strategies as st

KIB, MIB = 1 << 10, 1 << 20


class Ring:
    """A writer and its readers, over one memory mapped several times as in several processes."""

    def __init__(self, readers=2, capacity=4 * KIB, arena=MIB, native=(True, True)):
        writes, reads = map(hot_path, native)
        self.layout = RingLayout(readers=readers, capacity=capacity, arena=arena)
        self.memory = Memory.create(self.layout.size)
        self.room = Event(make_event())
        self.writer = RingWriter(self.memory, self.layout, self.room, 0.0, lambda: None, hot=writes)
        self.mappings = [
            Memory.attach(os.dup(self.memory.fd), self.layout.size) for _ in range(readers)
        ]
        self.readers = [
            RingReader(mapping, self.layout, index, self.room, hot=reads)
            for index, mapping in enumerate(self.mappings)
        ]

    def put(self, data, *buffers, number=1, name=b"", deadline=None):
        views = [memoryview(buffer) for buffer in buffers]
        self.writer.put(CALL, number, 7, -1, name, data, views, deadline)

    def close(self):
        for reader in self.readers:
            reader.close()
        self.writer.release()
        for memory in (self.memory, *self.mappings):
            memory.close()
        self.room.close()


ENDS = st.tuples(st.booleans(), st.booleans())
"""Whether the writer, and whether the readers are compiled: each understands the other."""


@pytest.fixture(params=[(True, True), (False, False)], ids=["compiled", "python"])
def native(request):
    if any(request.param) and why_not_native():
        pytest.skip(why_not_native())
    return request.param


@pytest.fixture
def make_ring(native):
    made = []

    def make(**options):
        made.append(Ring(native=native, **options))
        return made[-1]

    yield make
    for ring in made:
        ring.close()


def contents(message):
    return bytes(message[5]), [bytes(buffer) for buffer in message[6]]


messages = st.lists(
    st.tuples(st.integers(0, 9000), st.lists(st.integers(0, 200_000), max_size=3)), max_size=25
)


def send_and_read(ring, number, data, apart, order):
    """Have one message written and read by every reader, in some order; return what they got."""
    thread = threading.Thread(
        target=ring.put, args=(data, *apart), kwargs={"number": number, "name": b"m"}
    )
    thread.start()
    got = {}
    try:
        while thread.is_alive() or len(got) < len(ring.readers):
            index = order.randrange(len(ring.readers))
            message = ring.readers[index].take()
            if message is not None:
                assert index not in got
                got[index] = message
            time.sleep(0)
    finally:
        ring.writer.hasty = True
        thread.join()
        ring.writer.hasty = False
    return list(got.values())


@settings(max_examples=60, deadline=None)
@given(sizes=messages, seed=st.integers(), native=ENDS)
def test_every_reader_gets_every_message_in_order_whatever_their_sizes(sizes, seed, native):
    ring, order, kept = Ring(readers=3, native=native), random.Random(seed), []
    try:
        for number, (size, buffers) in enumerate(sizes):
            data, apart = os.urandom(size), [os.urandom(each) for each in buffers]
            for message in send_and_read(ring, number, data, apart, order):
                assert message[:5] == (CALL, number, 7, -1, b"m")
                assert contents(message) == (data, apart)
                if order.random() < 0.3:
                    kept.append((message, data, apart))
        assert all(contents(message) == (data, apart) for message, data, apart in kept)
    finally:
        ring.close()


def test_a_block_is_used_again_when_the_last_view_of_the_last_reader_is_gone(make_ring):
    ring = make_ring()
    slabs = ring.writer._slabs
    for _ in range(300):
        ring.put(b"", bytes(100 * KIB))
        for reader in ring.readers:
            reader.take()
    assert len(slabs._slabs) == 1

    ring.put(b"", b"a" * 100 * KIB)
    first, second = (reader.take() for reader in ring.readers)
    view = first[6][0][5:10]
    del first, second
    for _ in range(20):
        ring.put(b"", b"b" * 100 * KIB)
        for reader in ring.readers:
            reader.take()
    assert view == b"aaaaa"
    assert len(slabs._slabs) == 2
    del view
    gc.collect()
    assert all(slabs._free(slab) for slab in slabs._slabs)


def test_blocks_that_nobody_needs_any_more_give_their_memory_back(make_ring):
    ring = make_ring(arena=16 * MIB)
    slabs, data = ring.writer._slabs, os.urandom(8 * MIB)

    def memory():
        return os.fstat(ring.memory.fd).st_blocks * 512

    def tidied(seconds):
        slabs.tidy(time.monotonic() + seconds)
        return memory()

    ring.put(b"", data)
    messages = [reader.take() for reader in ring.readers]
    view = messages[1][6][0]
    assert tidied(2 * KEEP_S) >= 8 * MIB  # it is looked at
    del messages
    assert tidied(2 * KEEP_S) >= 8 * MIB  # by one reader still
    assert view == data
    del view
    assert tidied(0.0) >= 8 * MIB  # it may be needed in a moment
    assert tidied(2 * KEEP_S) < MIB

    ring.put(b"", data)
    assert all(reader.take()[6][0] == data for reader in ring.readers)
    assert len(slabs._slabs) == 1
    ring.put(b"", data[: 16 * MIB // 2 + 1], data[:100])  # a larger one: the arena is divided anew
    assert memory() < 17 * MIB


def test_views_that_fill_the_arena_make_messages_stream(make_ring):
    ring = make_ring(readers=1, capacity=64 * KIB, arena=MIB)
    reader = ring.readers[0]
    kept = []
    for number in range(40):
        thread = threading.Thread(target=ring.put, args=(b"", bytes([number]) * 60 * KIB))
        thread.start()
        while (message := reader.take()) is None:
            time.sleep(0)
        thread.join()
        kept.append(message)
    for number, message in enumerate(kept):
        assert contents(message) == (b"", [bytes([number]) * 60 * KIB])
        assert message[6][0].readonly
    assert reader._windows._held.keys() == set(range(len(ring.writer._slabs._slabs)))


def test_more_messages_are_held_than_there_are_slots(make_ring):
    ring = make_ring(readers=1, capacity=256 * KIB, arena=1 << 26)
    kept = []
    for _ in range(SLOTS + 5):
        ring.put(b"", bytes(40 * KIB))
        kept.append(ring.readers[0].take())
    assert all(contents(message) == (b"", [bytes(40 * KIB)]) for message in kept)


def test_memory_outlives_its_mapping_while_a_view_is_held(make_ring):
    ring = make_ring(readers=1)
    ring.put(b"", b"k" * 100 * KIB)
    view = ring.readers[0].take()[6][0]
    window = weakref.ref(view.obj)
    ring.close()
    assert bytes(view) == b"k" * 100 * KIB
    del view
    gc.collect()
    assert window() is None


def test_a_writer_without_room_waits_until_its_deadline_and_no_longer(make_ring):
    ring = make_ring(readers=2)
    for _ in range(4):
        ring.put(bytes(KIB - 64))
    ring.readers[0].take()
    began = time.monotonic()
    with pytest.raises(CallTimeoutError, match=r"readers \[1\] leave no room"):
        ring.put(bytes(KIB - 64), deadline=began + 0.1)
    assert 0.1 <= time.monotonic() - began < 5
    while ring.readers[1].take() is not None:
        pass
    ring.put(b"after")
    assert contents(ring.readers[1].take()) == (b"after", [])


def test_a_message_given_up_half_way_is_no_message(make_ring):
    ring = make_ring(readers=1, arena=4 * KIB)
    with pytest.raises(CallTimeoutError):
        ring.put(bytes(20 * KIB), number=1, deadline=time.monotonic() + 0.05)
    reader = ring.readers[0]
    assert reader.take() is None
    ring.put(b"next", number=2)
    assert reader.take()[1] == 2


def test_what_closes_or_gives_up_a_ring_frees_its_writer(make_ring):
    for free in (
        lambda ring: ring.memory.words.__setitem__(CLOSED, 1),
        lambda ring: setattr(ring.writer, "hasty", True),
    ):
        ring = make_ring(readers=1)
        raised = []

        def fill(ring=ring, raised=raised):
            try:
                while True:
                    ring.put(bytes(KIB - 64))
            except ChannelClosedError as error:
                raised.append(error)

        thread = threading.Thread(target=fill)
        thread.start()
        time.sleep(0.02)
        assert thread.is_alive()
        free(ring)
        thread.join(60)
        assert len(raised) == 1


def test_room_that_a_reader_makes_wakes_the_writer(make_ring):
    ring = make_ring(readers=1)
    for _ in range(4):
        ring.put(bytes(KIB - 64))
    thread = threading.Thread(target=ring.put, args=(bytes(KIB - 64),))
    thread.start()
    time.sleep(0.03)
    assert thread.is_alive()
    while ring.readers[0].take() is not None:
        pass
    thread.join(60)
    assert not thread.is_alive()


# What is not true is found out.


@settings(max_examples=300, deadline=None)
@given(
    noise=st.binary(min_size=24, max_size=300),
    length=st.integers(0, 5000) | st.integers(0, 2**64 - 1),
    real=st.booleans(),
    native=ENDS,
)
def test_noise_in_the_memory_ends_the_channel_and_nothing_else(noise, length, real, native):
    ring = Ring(readers=1, native=native)
    try:
        if real:
            ring.put(b"x" * 50, name=b"name")
        at = ring.layout.ring_at
        size = min(len(noise), ring.layout.capacity)
        ring.memory.map[at : at + size] = noise[:size]
        if not real:
            ring.memory.words[HEAD] = length
        try:
            for _ in range(200):
                if ring.readers[0].take() is None:
                    break
        except ChannelClosedError as error:
            assert "not used any more" in str(error) or "not to be found" in str(error)  # noqa: PT017
    finally:
        ring.close()


def test_what_was_read_cannot_be_taken_away(make_ring):
    ring = make_ring(readers=1)
    ring.put(b"one")
    ring.put(b"two")
    assert [contents(ring.readers[0].take())[0] for _ in range(2)] == [b"one", b"two"]
    ring.memory.words[HEAD] -= 32
    with pytest.raises(ChannelClosedError, match="less than was read"):
        ring.readers[0].take()


def test_a_block_that_is_not_this_channels_or_is_an_old_one_is_refused(make_ring):
    ring = make_ring(readers=1)
    ring.put(b"", bytes(100 * KIB))
    ring.readers[0].take()
    windows = ring.readers[0]._windows
    inside = ring.layout.arena_at
    for slot, use, offset, size in (
        (0, 1, inside, 100),  # released already
        (0, 2, inside - 8, 100),
        (0, 2, ring.layout.size - 50, 100),
        (SLOTS, 2, inside, 100),
        (0, 2, inside, ring.layout.size),
    ):
        with pytest.raises(ChannelClosedError, match="not to be found"):
            windows.open(slot, use, offset, size)


@given(table=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4), size=st.integers(0, 400))
def test_a_table_of_lengths_cannot_lead_out_of_its_block(table, size):
    block = b"".join(each.to_bytes(8, "little") for each in table).ljust(size, b"\0")
    try:
        parts = parts_of(memoryview(block), len(table))
    except EncodingError:
        return
    assert [len(part) for part in parts] == table
    assert sum(table) <= len(block)


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=6), st.integers(1, 500))
def test_an_image_comes_apart_as_it_was_put_together(parts, most):
    image = Image(parts)
    whole = bytearray(image.size)
    announced = []
    image.write(memoryview(whole), lambda: announced.append(bytes(whole)))
    assert [bytes(part) for part in parts_of(memoryview(whole), len(parts))] == parts
    assert len(announced) == 1
    pieces = [bytes(piece) for piece in image.pieces(most)]
    assert [bytes(p) for p in parts_of(memoryview(b"".join(pieces)), len(parts))] == parts


def test_readers_are_woken_shortly_before_a_large_message_is_in_place():
    first, last = bytes(100), b"x" * (3 * ANNOUNCED)
    image = Image([first, last])
    whole, announced = bytearray(image.size), []
    image.write(memoryview(whole), lambda: announced.append(whole.count(b"x")))
    assert announced == [2 * ANNOUNCED]
    assert whole.count(b"x") == len(last)


def test_memory_of_another_size_is_not_attached_and_none_can_be_cut_off(make_ring):
    ring = make_ring()
    with pytest.raises(UnsupportedError, match="bytes"):
        Memory.attach(ring.memory.fd, ring.layout.size - 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(ring.memory.fd, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(ring.memory.fd, ring.layout.size + 4096)
