"""What crosses: copies, references, and the path to what cannot."""

from __future__ import annotations

import functools
import threading

import pytest
from attrs import define, frozen
from hardpoint.errors import EncodingError
from hardpoint.messages import ModelRunnerOutput, SchedulerOutput, StepTicket
from hardpoint.rpc import codec
from hardpoint.rpc.calls import Call, PackedCall
from hardpoint.rpc.encoding import PickleCodec
from hypothesis import given
from hypothesis import strategies as st

LOCK = threading.Lock()

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner)
    | st.frozensets(st.integers()),
    max_leaves=12,
)  # fmt: skip


flat = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.complex_numbers(
        allow_nan=False
    ) | st.text(st.characters()) | st.binary()
)  # fmt: skip


@given(st.lists(flat))
def test_plain_values_and_arguments_arrive_as_they_are_by_the_shortest_way(values):
    local = PickleCodec()
    data = local.plain_arguments(tuple(values))
    call = PackedCall(call_id=1, generation=0, name="method", body=data)
    method, args, kwargs = call.unpack()
    assert (method, args, kwargs) == ("method", tuple(values), {})
    assert list(map(type, args)) == list(map(type, values))
    for value in values:
        back = codec.unpack(local.plain(value), "v")
        assert (type(back), back) == (type(value), value)
        assert str(back) == str(value)  # zeros have signs


def test_only_plain_values_go_the_shortest_way():
    class Number(int):
        pass

    local = PickleCodec()
    for value in (Number(1), [1], {}, (1,), {1}, bytearray(b"x"), codec):
        assert local.plain(value) is None
        assert local.plain_arguments((1, value)) is None


@given(plain)
def test_values_arrive_equal_and_mutable_ones_are_copies(value):
    back = codec.unpack(codec.pack(value, "v"), "v")
    assert back == value
    assert type(back) is type(value)
    if isinstance(value, list | dict):
        assert back is not value


@pytest.mark.parametrize(
    "value",
    [None, 1, "text", b"bytes", (1, (2, "x")), SchedulerOutput(step_id=1), StepTicket(step_id=1),
     ModelRunnerOutput(step_id=1), (SchedulerOutput(step_id=2), None)],
)  # fmt: skip
def test_immutable_values_and_step_messages_go_by_reference(value):
    parcel = codec.pack(value, "v")
    assert isinstance(parcel, codec.Carried)
    assert codec.unpack(parcel, "v") is value


@pytest.mark.parametrize("value", [[], {}, ([],), bytearray(b"x"), {1}, tuple(range(100))])
def test_everything_else_is_encoded(value):
    parcel = codec.pack(value, "v")
    assert isinstance(parcel, bytes)
    assert codec.unpack(parcel, "v") == value


def test_a_subclass_of_an_immutable_type_is_not_taken_for_one():
    class Text(str):
        __slots__ = ("more",)

    value = Text("a")
    value.more = []
    assert isinstance(codec.pack(value, "v"), bytes)


@define
class Slotted:
    held: object
    fine: int = 1


@frozen
class Outer:
    inner: object


class Plain:
    def __init__(self, held):
        self.held = held

    def method(self):
        return self.held


def closing_over(held):
    def function():
        return held

    return function


CYCLE = [1]
CYCLE.append(CYCLE)
CYCLE.append(LOCK)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (LOCK, "v"),
        ([1, LOCK], "v[1]"),
        ({"a": {"b": (0, LOCK)}}, "v['a']['b'][1]"),
        (Slotted(held=[LOCK]), "v.held[0]"),
        (Outer(inner=Slotted(held=LOCK)), "v.inner.held"),
        (Plain({"k": LOCK}), "v.held['k']"),
        (Plain(LOCK).method, "v.__self__.held"),
        (functools.partial(max, LOCK), "v.args[0]"),
        (functools.partial(max, key=LOCK), "v.keywords['key']"),
        (closing_over([LOCK]), "v.<closure held>[0]"),
        (LOCK.acquire, "v"),
        (CYCLE, "v[2]"),
        ((x for x in ()), "v"),
    ],
)
def test_the_path_leads_to_the_smallest_part_that_cannot_cross(value, path):
    with pytest.raises(EncodingError) as caught:
        codec.encode(value, "v")
    message = str(caught.value)
    assert message.startswith(path)
    assert "is not encodable" in message
    assert "\n" not in message
    assert caught.value.__cause__ is not None


def test_deep_nesting_is_an_encoding_error_not_a_crash():
    value = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(EncodingError):
        codec.encode(value, "v")
    while value:  # taken apart by hand, or its deallocation recurses
        value = value.pop()


def test_what_rebuilds_badly_is_an_encoding_error_on_arrival():
    class Unbuildable:
        def __reduce__(self):
            return (int, ("not a number",))

    with pytest.raises(EncodingError, match=r"^v was sent but cannot be rebuilt here \(ValueError"):
        codec.decode(codec.encode(Unbuildable(), "v"), "v")


def test_an_exception_travels_only_if_its_copy_is_of_its_type():
    class StrangeError(Exception):
        def __reduce__(self):
            return (ValueError, ("another",))

    assert codec.encode_exception(StrangeError()) is None
    assert codec.encode_exception(RuntimeError(LOCK)) is None
    back = codec.decode_exception(codec.encode_exception(KeyError("x")))
    assert (type(back), back.args) == (KeyError, ("x",))
    assert codec.decode_exception(b"garbage") is None
    assert codec.decode_exception(codec.encode("text", "v")) is None


def test_large_bytes_of_a_call_and_of_a_result_travel_uncopied():
    large, small = bytes(codec.LARGE_BYTES), bytes(codec.LARGE_BYTES - 1)
    call = Call(1, 0, "method", (large, 5, small), {"named": large})
    local = PickleCodec()
    assert local.plain_arguments(call.args) is None
    assert local.plain(large) is None
    data, buffers = local.encode_call(call)
    assert [buffer.obj is large for buffer in buffers] == [True, True]
    assert len(data) < len(small) + 1000
    parcel = local.parcel(data, buffers)
    assert codec.unpack(parcel, "x") == ("method", (large, 5, small), {"named": large})
    assert call.args[0] is large

    answer = local.encode(large, "result")
    assert [buffer.obj is large for buffer in answer.buffers] == [True]
    assert codec.unpack(answer, "x") == large
    assert local.plain_arguments((small,)) is not None
