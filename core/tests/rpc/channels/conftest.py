"""A driver's end and its workers, in processes of their own or, where it makes no difference, on
threads of the test's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from attrs import evolve
from hardpoint.rpc import channel
from hardpoint.rpc.calls import Call, CallTable
from hardpoint.rpc.receiver import Receiver
from hardpoint.rpc.shared_memory.parting import CROWD

SCRIPT = Path(__file__).with_name("channel_worker.py")
PATIENCE = 30.0
KINDS = ("shared_memory", "python", "zmq")
"""``python`` is ``shared_memory`` without the compiled hot path."""


def _worker_module():
    name = "channel_worker_of_the_tests"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SCRIPT)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


class Group:
    """N workers behind one channel; ``call`` is a small collective_rpc."""

    def __init__(self, kind, world_size, *, spin_us=200.0, near=False, start=True, codec=None):
        self.world_size = world_size
        native = kind != "python"
        kind = kind if native else "shared_memory"
        self.end = channel.create(kind, world_size, spin_us=spin_us, codec=codec, native=native)
        self.table = CallTable()
        self.receiver = Receiver(self.end, self.table)
        self.codec = codec
        self.workers = []
        if start:
            for rank in range(world_size):
                (self.start_thread if near else self.start_process)(rank)
            self.call("rank_of")  # all are there

    def start_process(self, rank, crowd=CROWD):
        handle = self.end.worker_handle(rank)
        told = {"fds": handle.fds, "data": dict(handle.data), "rank": rank, "crowd": str(crowd)}
        command = [sys.executable, str(SCRIPT), json.dumps(told)]
        self.workers.append(subprocess.Popen(command, pass_fds=handle.fds))

    def attach(self, rank):
        """Return a worker's end in this process, over descriptors of its own."""
        handle = self.end.worker_handle(rank)
        own = evolve(handle, fds=tuple(os.dup(fd) for fd in handle.fds))
        return channel.attach(own, rank, codec=self.codec)

    def start_thread(self, rank):
        end = self.attach(rank)
        thread = threading.Thread(target=_worker_module().serve, args=(end, rank), daemon=True)
        thread.start()
        self.workers.append(thread)

    def make(self, method, *args, timeout=None, non_block=False, reply_rank=None):
        return Call(
            call_id=self.table.next_id(),
            generation=0,
            method=method,
            args=args,
            reply_rank=reply_rank,
            timeout=timeout,
            deadline=None if timeout is None else time.monotonic() + timeout,
            queued=non_block,
        )

    def call(self, method, *args, timeout=PATIENCE, non_block=False, reply_rank=None):
        """Call every worker; return the values, or a future of them."""
        self.end.rouse()
        call = self.make(method, *args, timeout=timeout, non_block=non_block, reply_rank=reply_rank)
        gather = self.table.open(call, self.world_size)
        try:
            self.end.send(call)
        except BaseException:
            self.table.forget(call.call_id)
            raise
        if non_block:
            self.receiver.watch()
            return gather.future
        if not self.receiver.wait(gather, call.deadline):
            self.table.expire(call.call_id)
            gather.wait(None)
        return gather.result()

    def stop(self):
        self.receiver.close()
        self.end.close()
        for worker in self.workers:
            if isinstance(worker, threading.Thread):
                worker.join(PATIENCE)
                assert not worker.is_alive()
            else:
                assert worker.wait(PATIENCE) == 0


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def make_group():
    """Make groups that end with the test."""
    made = []

    def make(kind, world_size, **options):
        made.append(Group(kind, world_size, **options))
        return made[-1]

    yield make
    for group in made:
        group.stop()


@pytest.fixture
def wait_until():
    """Wait for a condition, looking often; fail after PATIENCE."""

    def wait(condition, seconds=PATIENCE):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it never came true"
            time.sleep(0.002)

    return wait
