"""A worker with no Hardpoint worker in it: attaches to a channel and does as each call says."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from pickle import PickleBuffer

from hardpoint.rpc import channel, codec
from hardpoint.rpc.calls import Reply
from hardpoint.rpc.channel import ChannelClosedError, WorkerHandle
from hardpoint.rpc.failures import RemoteFailure
from hardpoint.rpc.shared_memory import worker_end

PATIENCE = 30.0


def wait_for(path):
    deadline = time.monotonic() + PATIENCE
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} never came")
        time.sleep(0.002)


class Methods:
    def __init__(self, end, rank):
        self.end = end
        self.rank = rank
        self.kept = {}

    def echo(self, value):
        return value

    def nothing(self, *values):
        return None

    def rank_of(self):
        return self.rank

    def size(self, buffer):
        view = memoryview(buffer)
        return view.nbytes, view.readonly

    def back(self, buffer):
        """Return a buffer as a buffer: what travels apart, travels apart back."""
        return PickleBuffer(buffer)

    def keep(self, name, buffer):
        self.kept[name] = memoryview(buffer)

    def digest(self, name):
        return hashlib.sha256(self.kept[name]).hexdigest()

    def drop(self, name):
        del self.kept[name]

    def gate(self, entered, opened):
        Path(f"{entered}.{self.rank}").touch()
        wait_for(opened)
        return self.rank

    def fail(self, text):
        raise ValueError(text)

    def lock(self):
        return threading.Lock()

    def cpu(self):
        return time.process_time()

    def confine(self, processors):
        os.sched_setaffinity(0, processors)

    def parted(self):
        """Return where this thread may run, and how often its end met the driver and went away."""
        reader = self.end._calls.inline
        return tuple(sorted(os.sched_getaffinity(0))), reader.met, reader.parted


def serve(end, rank):
    """Run calls until one is "stop" or the channel closes; return how many were run."""
    methods, count = Methods(end, rank), 0
    try:
        while True:
            call = end.receive(None)
            if call is None:
                continue
            count += 1
            value = failure = None
            try:
                method, args, kwargs = call.unpack()
                if method == "stop":
                    return count
                value = codec.Carried(getattr(methods, method)(*args, **kwargs), method)
            except BaseException as error:
                failure = RemoteFailure.of(error)
            end.reply(
                Reply(
                    call_id=call.call_id,
                    rank=rank,
                    generation=call.generation,
                    value=value,
                    failure=failure,
                )
            )
            del call, value
            args = kwargs = None
    except ChannelClosedError:
        return count
    finally:
        end.close()


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    worker_end.CROWD = told["crowd"]
    given = WorkerHandle(fds=tuple(told["fds"]), data=told["data"])
    serve(channel.attach(given, told["rank"]), told["rank"])
    sys.stdout.flush()
    os._exit(0)
