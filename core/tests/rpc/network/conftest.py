"""A hub and its workers on threads of the test's process, each with an address of its own."""

from __future__ import annotations

import os
import threading
import time

import pytest
from attrs import evolve
from hardpoint.rpc import channel
from hardpoint.rpc.calls import Call, CallTable, Reply
from hardpoint.rpc.composite import CompositeDriverEnd
from hardpoint.rpc.encoding import PickleCodec
from hardpoint.rpc.network.hub import Hub, attach
from hardpoint.rpc.receiver import Receiver

PATIENCE = 30.0
HOST = "127.0.0.2"


class Group:
    """``world_size`` workers, those of ``remote`` behind a hub, which answer (rank, name, args). To
    the others anything may be sent.
    """

    def __init__(self, world_size, remote, *, start=True, bounds=None):
        self.world_size, self.remote = world_size, tuple(remote)
        self.local = local = [rank for rank in range(world_size) if rank not in self.remote]
        self.hub = Hub(world_size, self.remote, HOST, bounds=bounds)
        self.end = self.hub.end
        if local:
            shared = channel.create("shared_memory", len(local), codec=PickleCodec())
            self.end = CompositeDriverEnd(shared, local, self.hub.end, self.remote)
        self.table = CallTable()
        self.receiver = Receiver(self.end, self.table)
        self.seen = {rank: [] for rank in range(world_size)}
        self.hold = threading.Event()
        self.hold.set()
        self.workers = []
        if start:
            for rank in range(world_size):
                self.start(rank)

    def attach(self, rank):
        if rank in self.remote:
            return attach(self.hub.worker_data(rank)["channel"], rank)
        handle = self.end.worker_handle(rank)
        own = evolve(handle, fds=tuple(os.dup(fd) for fd in handle.fds))
        return channel.attach(own, self.local.index(rank), codec=PickleCodec())

    def start(self, rank):
        thread = threading.Thread(target=self._serve, args=(self.attach(rank), rank), daemon=True)
        thread.start()
        self.workers.append(thread)

    def _serve(self, end, rank):
        try:
            while True:
                self.hold.wait()
                call = end.receive(None)
                _, args, _ = call.unpack()
                self.seen[rank].append((call.call_id, call.name, args))
                size = args[0] if call.name == "size" else None
                value = bytes(size) if size else (rank, call.name, args)
                end.reply(Reply(call.call_id, rank, call.generation, value, of=call.name))
        except channel.ChannelClosedError:
            end.close()

    def call(self, method, *args, timeout=PATIENCE, non_block=False):
        deadline = time.monotonic() + timeout
        call = Call(self.table.next_id(), 0, method, args, {}, None, timeout, deadline, non_block)
        gather = self.table.open(call, self.world_size)
        try:
            self.end.send(call)
        except BaseException:
            self.table.forget(call.call_id)
            raise
        if non_block:
            self.receiver.watch()
            return gather.future
        if not self.receiver.wait(gather, deadline):
            self.table.expire(call.call_id)
            gather.wait(None)
        return gather.result()

    def stop(self):
        self.hold.set()
        self.receiver.close()
        self.end.close()
        self.hub.close()
        for worker in self.workers:
            worker.join(PATIENCE)
            assert not worker.is_alive()


@pytest.fixture
def make_group():
    made = []

    def make(*given, **options):
        made.append(Group(*given, **options))
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
            time.sleep(0.01)

    return wait
