"""A driver to be killed, stopped, or made to raise: one life from start to shutdown, and a second
one. It says where it is, a JSON line each, and waits for a line where it is idle.

SIGUSR1 raises ValueError and SIGUSR2 MemoryError wherever it is; the line ``exit`` ends it at once.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fault_groups import plans, prepare, step
from hardpoint.messages import SchedulerOutput
from hardpoint.rpc.faults import fault

LINES: queue.SimpleQueue[str] = queue.SimpleQueue()


def say(word, what=None):
    print(json.dumps([word, what]), flush=True)


def listen():
    for line in sys.stdin:
        if line.strip() == "exit":
            os._exit(3)
        LINES.put(line.strip())


def plan_in_worker(worker, text):
    from hardpoint.rpc import faults  # the worker's own: this function travels by value

    faults.fault.plan(text)


def wait(executor=None):
    """Wait for ``go``; on the way, plan faults: ``here FOLDER:FAULTS`` or ``there ...``."""
    while (line := LINES.get()) != "go":
        where, _, plan = line.partition(" ")
        if where == "here":
            fault.plan(plan)
        else:
            executor.collective_rpc(plan_in_worker, args=(plan,))


def trap(error):
    def handle(signum, frame):
        raise error("the driver's own")

    return handle


def guarded(phase, action):
    """Do ``action()``; say what it raises. Return its value, or None."""
    try:
        return action()
    except Exception as error:
        say("raised", [phase, type(error).__name__, str(error)])
        return None


def start(overrides):
    executor_class, *parts = prepare(**overrides)
    say("starting")
    executor = executor_class.start(*parts)
    executor.initialize_cache(plans(executor))
    return executor


def live(executor):
    say("idle", executor.collective_rpc(lambda worker: os.getpid()))
    guarded("idle", lambda: wait(executor))
    guarded("step", lambda: [say("stepping"), step(executor, 1)])
    say("stepped", executor.collective_rpc("supported_tasks", reply_rank=0))
    ticket = executor.execute_model(SchedulerOutput(step_id=2, defer_sampling=True))
    guarded("between", lambda: [say("between"), wait(executor)])
    say("sampled", executor.sample_tokens(ticket).step_id)
    failure = executor.failure
    say("closing", None if failure is None else repr(failure))
    guarded("shutdown", lambda: executor.shutdown(3))
    executor.shutdown()
    say("closed")


def main():
    signal.signal(signal.SIGUSR1, trap(ValueError))
    signal.signal(signal.SIGUSR2, trap(MemoryError))
    threading.Thread(target=listen, daemon=True).start()
    overrides = {
        name: json.loads(value) if value[:1] in "0123456789tf[{" else value
        for name, value in (each.split("=", 1) for each in sys.argv[1:])
    }
    executor = guarded("start", lambda: start(overrides))
    if executor is not None:
        live(executor)
    say("free")
    LINES.get()
    second = start({})
    say("again", step(second, 1).step_id)
    second.shutdown()


if __name__ == "__main__":
    main()
