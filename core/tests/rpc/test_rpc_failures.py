"""Answers and exceptions whose own code raises: each call still ends, once, and is told why."""

from __future__ import annotations

import threading

import pytest
from hardpoint.errors import EncodingError, RemoteError
from hardpoint.isolation import LONGEST_TEXT
from hardpoint.rpc import codec
from hardpoint.rpc.calls import Call, CallTable, RemoteFailure, Reply


class Hostile:
    """Raises ``kind`` where it is rebuilt."""

    def __init__(self, kind):
        self.kind = kind

    def __reduce__(self):
        return (throw, (self.kind,))


def throw(kind):
    raise kind(7)


class WithoutTextError(Exception):
    def __str__(self):
        raise SystemExit(1)

    __repr__ = __str__


class WithoutNotesError(Exception):
    @property
    def __notes__(self):
        raise SystemExit(9)


class WithoutCauseError(Exception):
    __cause__ = property(lambda self: 1 / 0)


class RebuiltError(Exception):
    def __reduce__(self):
        return (throw, (SystemExit,))


class OfItsOwnMindError(Exception):
    """Its cause cannot be set."""

    def __setattr__(self, name, value):
        raise KeyboardInterrupt

    __cause__ = property(lambda self: None)


class WithoutClassError(Exception):
    """Nothing of it can be looked at."""

    def __getattribute__(self, name):
        raise RecursionError(name)


def begin(table, method="m"):
    return table.open(Call(call_id=table.next_id(), generation=0, method=method), 1)


def answer(table, gather, **fields):
    table.deliver(Reply(call_id=gather.call.call_id, rank=0, generation=0, **fields))


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, ValueError])
def test_a_result_that_raises_when_rebuilt_is_the_calls_error(kind):
    table = CallTable()
    gather = begin(table)
    answer(table, gather, value=codec.encode(Hostile(kind), "result"))
    error = gather.future.exception(0)
    assert isinstance(error, EncodingError)
    assert "result of 'm'" in str(error)
    assert kind.__name__ in str(error)
    assert table.pending == 0


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, ZeroDivisionError])
def test_a_callback_that_raises_is_logged_and_hurts_nobody(kind, caplog):
    table = CallTable()
    gather, other = begin(table, "first"), begin(table, "second")
    gather.future.add_done_callback(lambda future: throw(kind))

    def deliver():
        answer(table, gather, value=codec.pack(1, "v"))
        answer(table, other, value=codec.pack(2, "v"))

    thread = threading.Thread(target=deliver)
    thread.start()
    thread.join()
    assert (gather.future.result(0), other.future.result(0)) == ([1], [2])
    assert kind.__name__ in caplog.text


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (WithoutTextError(), ["WithoutTextError", "<its __str__ raised SystemExit>"]),
        (WithoutNotesError("told"), ["WithoutNotesError", "told", "SystemExit"]),
        (WithoutCauseError("told"), ["WithoutCauseError", "told", "ZeroDivisionError"]),
        (RebuiltError("told"), ["RebuiltError", "told"]),
        (OfItsOwnMindError("told"), ["OfItsOwnMindError", "told"]),
        (WithoutClassError("told"), ["WithoutClassError", "told", "RecursionError"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_exception_whose_own_code_raises_is_told_as_far_as_it_goes(error, facts):
    table = CallTable()
    gather = begin(table)
    BaseException.__setattr__(error, "__context__", ValueError("before"))
    answer(table, gather, failure=RemoteFailure.of(error))
    told = gather.future.exception(0)
    assert isinstance(told, RemoteError)
    text = "\n".join([str(told), *told.__notes__])
    assert all(fact in text for fact in facts), text


def test_long_texts_are_cut_and_say_so():
    error = ValueError("x" * 10_000_000)
    for _ in range(3):
        error.add_note("n" * 1_000_000)
    failure = RemoteFailure.of(error)
    room = LONGEST_TEXT + 200
    for text in (failure.message, failure.traceback, "".join(failure.notes)):
        assert len(text) < room
        assert f"at most {LONGEST_TEXT} are kept" in text
    assert failure.encoded is None
    assert any("too many to send" in note for note in failure.notes)


def test_an_exception_of_common_size_travels_whole():
    failure = RemoteFailure.of(ValueError("x" * LONGEST_TEXT))
    assert failure.message == "x" * LONGEST_TEXT
    assert isinstance(failure.original(), ValueError)
    assert failure.notes == ()
