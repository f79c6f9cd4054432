"""A driver that starts, uses and ends one group after the other until its standard input ends, and
says how each of them went, a JSON line each.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fault_groups import plans, prepare, step
from hardpoint.errors import HardpointError

ENOUGH = threading.Event()


def say(word, what=None):
    print(json.dumps([word, what]), flush=True)


def listen():
    sys.stdin.read()
    ENOUGH.set()


def live(overrides):
    executor_class, *parts = prepare(**overrides)
    executor = executor_class.start(*parts)
    try:
        executor.initialize_cache(plans(executor))
        steps = [step(executor, number, non_block=True) for number in range(1, 40)]
        assert [each.result(60).step_id for each in steps] == list(range(1, 40))
        executor.check_health()
    finally:
        executor.shutdown(5)


def main():
    overrides = dict(each.split("=", 1) for each in sys.argv[1:])
    overrides["plugins.dummy.step_seconds"] = 0.005
    threading.Thread(target=listen, daemon=True).start()
    while not ENOUGH.is_set():
        say("begins")
        try:
            live(overrides)
        except HardpointError as error:
            say("failed", f"{type(error).__name__}: {error}")
        else:
            say("ended")
    say("enough")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("interrupted")
