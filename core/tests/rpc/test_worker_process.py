"""A worker's process from its boot record to its end, over a channel that a test holds."""

from __future__ import annotations

import gc
import signal
from collections import deque

import pytest
from attrs import evolve
from hardpoint.checkpoints import read_description
from hardpoint.config import resolution
from hardpoint.config.loading import load_config
from hardpoint.registry import Registry
from hardpoint.rpc import codec, worker_process
from hardpoint.rpc.calls import PackedCall
from hardpoint.rpc.channel import ChannelClosedError
from hardpoint.rpc.control import ControlLane, ControlThread, Order, lane
from hardpoint.rpc.worker_process import FAILED, Boot, run
from hardpoint.selection import select_platform
from hardpoint_dummy.worker import DummyWorker


class End:
    """A worker's end: gives the calls that it holds, then tells that the channel is closed."""

    def __init__(self, *calls):
        self.calls = deque(calls)
        self.replies = []
        self.closed = False

    def receive(self, timeout=None):
        if not self.calls:
            raise ChannelClosedError("closed")
        return self.calls.popleft()

    def reply(self, reply):
        self.replies.append(reply)

    def close(self):
        self.closed = True


def call(number, method, *args):
    name = method if isinstance(method, str) else method.__qualname__
    body = codec.pack_arguments(method, args, {}, name)
    return PackedCall(call_id=number, generation=0, name=name, body=body, queued=True)


SHUTDOWN = call(99, "shutdown")


@pytest.fixture
def boot():
    def make(**keys):
        config = load_config(
            overrides={"model": "dummy", "load_format": "dummy", "platform": "dummy", **keys},
            environ={},
        )
        registry = Registry.discover(config)
        platform = select_platform(registry, config)
        config = evolve(config, description=read_description("dummy", "dummy"))
        config = resolution.configure(config, registry, platform)
        config = resolution.fill_defaults(config, platform)
        return Boot(
            config=config,
            plugins=tuple(registry.resolved()),
            platform="dummy",
            worker_class=registry.worker_class(config, platform),
            model_runner=registry.model_runner_class(config, platform),
            rank=0,
            local_rank=0,
            world_size=1,
            generation=0,
            start_call=1,
        )

    return make


@pytest.fixture
def process(monkeypatch):
    """Run a worker here; its signals and its logging are not this process's."""
    monkeypatch.setattr(worker_process, "_log", lambda level: None)
    ended = []
    monkeypatch.setattr(worker_process.os, "kill", lambda pid, signum: ended.append(signum))
    before = signal.getsignal(signal.SIGTERM)
    ours, theirs = lane()
    control = ControlThread(theirs, 60.0)
    driver = ControlLane(ours)

    class Process:
        signals = ended
        lane = driver

        def __init__(self):
            self.control = control

        def run(self, boot, end, begin=None):
            return run(boot, lambda: end, control, begin)

        def stages(self):
            return [report.text for report in driver.reports()[0]]

    yield Process()
    signal.signal(signal.SIGTERM, before)
    gc.unfreeze()
    driver.close()
    theirs.close()


def value(reply):
    return reply.value if reply.of else codec.unpack(reply.value, "value", "test")


def test_a_worker_is_built_serves_and_ends(boot, process):
    end = End(call(2, "init_device"), call(3, lambda worker: worker.rank), SHUTDOWN)
    assert process.run(boot(), end) == 0
    assert [(r.call_id, r.rank, r.failure) for r in end.replies] == [
        (number, 0, None) for number in (1, 2, 3, 99)
    ]
    assert value(end.replies[2]) == 0
    assert end.closed
    assert process.stages() == ["channel", "plugins", "worker", "ready"]
    assert process.signals == []


def test_a_worker_that_cannot_be_built_says_why_and_waits_for_the_driver(boot, process):
    end = End(call(2, "init_device"), None, SHUTDOWN, call(100, "never reached"))
    assert process.run(boot(**{"plugins.dummy.fail_at": "build"}), end) == FAILED
    (reply,) = end.replies
    assert reply.call_id == 1
    assert reply.failure.type_name == "hardpoint_dummy.faults.DummyFault"
    assert len(end.calls) == 1
    assert process.stages() == ["channel", "plugins", "worker"]


def test_a_failing_call_is_acknowledged_and_the_worker_goes_on(boot, process):
    end = End(call(2, "absent"), call(3, lambda worker: "fine"), SHUTDOWN)
    assert process.run(boot(), end) == 0
    assert end.replies[1].failure is not None
    assert value(end.replies[2]) == "fine"


def test_a_call_that_was_taken_back_is_acknowledged_and_not_run(boot, process, tmp_path):
    end = End(call(2, note, str(tmp_path), 2), call(3, note, str(tmp_path), 3), SHUTDOWN)
    assert process.run(boot(), end, begin=lambda number: number != 2) == 0
    assert [reply.call_id for reply in end.replies] == [1, 2, 3, 99]
    assert end.replies[1].value is None is end.replies[1].failure
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def note(worker, folder, number):
    from pathlib import Path

    (Path(folder) / str(number)).touch()


def test_after_the_order_to_leave_no_call_is_begun_but_the_last(boot, process, tmp_path):

    class Cancelling(End):
        def receive(self, timeout=None):
            if len(self.calls) == 2:
                process.lane.order(Order.CANCEL)
                process.control._obey_next()
            return super().receive(timeout)

    end = Cancelling(call(2, note, str(tmp_path), 2), call(3, note, str(tmp_path), 3), SHUTDOWN)
    assert process.run(boot(), end) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["2"]
    assert [reply.call_id for reply in end.replies] == [1, 2, 99]


def test_a_closed_channel_ends_the_worker_in_order(boot, process, tmp_path):
    marker = tmp_path / "closed"
    end = End(call(2, keep_marker, str(marker)))
    assert process.run(boot(), end) == 0
    assert marker.exists()
    assert end.closed


def keep_marker(worker, path):
    from pathlib import Path

    shut_down = worker.shutdown

    def told():
        shut_down()
        Path(path).touch()

    worker.shutdown = told


def test_sigterm_leaves_the_call_shuts_down_and_is_the_end(boot, process, tmp_path):
    marker = tmp_path / "closed"
    end = End(
        call(2, keep_marker, str(marker)), call(3, raise_sigterm), call(4, note, str(tmp_path), 4)
    )
    process.run(boot(), end)
    assert process.signals == [signal.SIGTERM]
    assert marker.exists()
    assert [reply.call_id for reply in end.replies] == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["closed"]


def raise_sigterm(worker):
    signal.raise_signal(signal.SIGTERM)
    raise AssertionError("SIGTERM was not heard")


def test_the_worker_hears_of_an_end_of_collectives_before_its_shutdown_and_not_after(
    boot, process, monkeypatch
):
    heard = []
    monkeypatch.setattr(DummyWorker, "end_collectives", lambda worker: heard.append("end"))
    monkeypatch.setattr(DummyWorker, "shutdown", lambda worker: heard.append("shutdown"))
    process.lane.order(Order.END_COLLECTIVES)  # no control thread runs here: it is late
    process.run(boot(), End(SHUTDOWN))
    process.lane.order(Order.CANCEL)
    process.control.before_shutdown()
    assert process.control.cancelled()
    assert heard == ["end", "shutdown"]
