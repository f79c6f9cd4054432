"""Where a compiled graph and a worker meet: what goes by which, and that no step gets another's.
No Ray is started here.
"""

from __future__ import annotations

import threading
from collections import deque

import pytest
from hardpoint.errors import EncodingError
from hardpoint.rpc import codec
from hardpoint.rpc.calls import Call, Reply
from hardpoint.rpc.encoding import PickleCodec, codec_named
from hardpoint.rpc.failures import RemoteFailure
from hardpoint_ray import step_line
from hardpoint_ray.frames import joined, parted
from hardpoint_ray.step_line import MARK, GraphEnd, GraphOrderError, StepLine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

on_a_busy_machine = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@on_a_busy_machine
@given(st.lists(st.binary(max_size=40), max_size=5))
def test_pieces_come_apart_as_they_were(pieces):
    assert [bytes(each) for each in parted(joined(pieces))] == pieces


def test_nothing_has_no_pieces():
    assert parted(b"") == []


@on_a_busy_machine
@given(st.binary(min_size=1, max_size=60))
def test_bytes_that_are_no_pieces_are_refused_or_read_whole(data):
    try:
        pieces = parted(data)
    except EncodingError:
        return
    assert joined(pieces) == data


class Channel:
    """Stands for a worker's end of a channel: calls to come, replies that were sent."""

    def __init__(self):
        self.calls, self.replies = deque(), []

    def receive(self, timeout=None):
        return self.calls.popleft() if self.calls else None

    def reply(self, reply):
        self.replies.append(reply)

    def close(self):
        pass


class Meeting:
    """A graph end over such a channel, and a thread that runs the graph's steps one by one."""

    def __init__(self, chosen=None, *, answers=True, most=None):
        self.codec = PickleCodec() if chosen is None else chosen
        self.channel, self.line, self.leaves = Channel(), StepLine(most), False
        self.end = GraphEnd(self.channel, self.codec, self.line, lambda: self.leaves, answers)
        self.steps, self.out = deque(), []
        self.wakes = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        while True:
            self.wakes.acquire()
            if not self.steps:
                return
            self.out.append(self.line.run(*self.steps.popleft()))

    def send(self, call, carried=b"", *, apart=False):
        """Send a step as the driver does; ``apart``: its arguments by the channel."""
        data, buffers = self.codec.encode_call(call)
        number = call.call_id.to_bytes(8, "little")
        pieces = (number,) if apart else (number, data, *buffers)
        args = call.args if apart else ()
        turn = Call(
            call_id=call.call_id,
            generation=0,
            method=f"{MARK}{call.method}",
            args=args,
            kwargs=call.kwargs if apart else {},
        )
        self.channel.calls.append(turn.pack(self.codec))
        self.steps.append((joined(pieces), carried))
        self.wakes.release()

    def close(self):
        self.end.close()
        self.wakes.release()
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture(params=["pickle", "typed"])
def meeting(request):
    made = Meeting(codec_named(request.param))
    yield made
    made.close()


def step(call_id, *args, **kwargs):
    return Call(call_id=call_id, generation=0, method="execute_model", args=args, kwargs=kwargs)


def test_a_step_has_its_arguments_by_the_graph_and_its_answer_too(meeting):
    meeting.send(step(7, 1, "two", key=[3]))
    call = meeting.end.receive()
    assert call.name == "execute_model"
    method, args, kwargs = call.unpack()
    assert (method, list(args), dict(kwargs)) == ("execute_model", [1, "two"], {"key": [3]})
    meeting.end.reply(Reply(7, 0, 0, [1.5, "answer"], None, "execute_model"))
    meeting.close()
    data, *buffers = parted(meeting.out[0])
    value = meeting.codec.parcel(bytes(data), buffers)
    assert codec.unpack(value, "result", "execute_model") == [1.5, "answer"]
    assert meeting.channel.replies == []


def test_arguments_that_are_too_large_come_by_the_channel(meeting):
    meeting.send(step(1, b"large"), apart=True)
    call = meeting.end.receive()
    method, args, _ = call.unpack()
    assert (call.name, method, list(args)) == ("execute_model", "execute_model", [b"large"])


@pytest.mark.parametrize("size", [10, step_line.LARGEST + 1])
def test_an_answer_that_is_too_large_goes_by_the_channel(meeting, size):
    meeting.send(step(1))
    meeting.end.receive()
    reply = Reply(1, 0, 0, b"x" * size, None, "execute_model")
    meeting.end.reply(reply)
    meeting.close()
    large = size > step_line.LARGEST
    assert meeting.channel.replies == ([reply] if large else [])
    assert bool(parted(meeting.out[0])) != large


def test_what_is_not_answered_by_the_graph_is_acknowledged_by_the_channel(meeting):
    failure = RemoteFailure(type_name="KeyError", message="k", traceback="")
    for number, reply in enumerate(
        [Reply(1, 0, 0), Reply(2, 0, 0, None, failure), Reply(3, 0, 0, None, None, "x")], 1
    ):
        meeting.send(step(number))
        meeting.end.receive()
        meeting.end.reply(reply)
        assert meeting.channel.replies[-1] is reply
    meeting.close()
    assert [parted(each) for each in meeting.out] == [[]] * 3


def test_a_value_that_cannot_be_encoded_is_an_error_of_its_call():
    meeting = Meeting()
    meeting.send(step(1))
    meeting.end.receive()
    meeting.end.reply(Reply(1, 0, 0, (x for x in ()), None, "execute_model"))
    (reply,) = meeting.channel.replies
    assert reply.failure.type_name.endswith("EncodingError")
    meeting.close()


def test_other_calls_pass_though_named_like_a_step(meeting):
    call = step(1).pack(meeting.codec)
    meeting.channel.calls.append(call)
    assert meeting.end.receive() is call
    meeting.end.reply(reply := Reply(1, 0, 0))
    assert meeting.channel.replies == [reply]
    assert meeting.end.receive() is None


def test_a_step_that_nobody_answered_does_not_hold_the_next(meeting):
    meeting.send(step(1))
    meeting.send(step(2, "second"))
    meeting.end.receive()
    assert list(meeting.end.receive().unpack()[1]) == ["second"]


def test_another_step_than_the_one_whose_turn_it_is_is_refused(meeting):
    meeting.send(step(1))
    meeting.channel.calls[0].call_id = 2
    with pytest.raises(GraphOrderError, match="the graph brought call 1, and call 2 was its turn"):
        meeting.end.receive()


def test_a_worker_that_is_to_leave_waits_for_no_step(meeting):
    meeting.send(step(1))
    meeting.steps.clear()
    meeting.leaves = True
    assert meeting.end.receive().name == "execute_model"


def test_stages_take_what_came_and_hand_on_what_goes_with_the_step():
    meeting = Meeting(answers=False)
    meeting.send(step(1), joined((b"one", b"two")))
    meeting.end.receive()
    assert [bytes(meeting.line.handed_on()) for _ in range(2)] == [b"one", b"two"]
    assert meeting.line.handed_on() is None
    meeting.line.hand_on(b"mine")
    reply = Reply(1, 0, 0, "a value", None, "execute_model")
    meeting.end.reply(reply)
    meeting.send(step(2))  # what was left of the step before is not this one's
    meeting.end.receive()
    assert meeting.line.handed_on() is None
    meeting.close()
    assert [bytes(each) for each in parted(meeting.out[0])] == [b"mine"]
    assert meeting.channel.replies == [reply]


def test_more_than_a_channel_to_another_node_holds_is_refused_with_the_way_out():
    line = StepLine(10)
    line.hand_on(b"123456")
    with pytest.raises(EncodingError, match=r"12 bytes .* holds 10: lower max_num_batched_tokens"):
        line.hand_on(b"123456")
