"""A driver for tests: starts ``ray`` on the dummy platform, and a Ray with it; says where it is, a
JSON line each, waits for a failure, says which, and ends. Keys of the configuration are its
arguments, as KEY=VALUE.
"""

import json
import os
import sys
import threading
import time

from ray_start import start


def say(**what):
    print(json.dumps(what), flush=True)


def pid_of(worker):
    return os.getpid()


keys = dict(each.split("=", 1) for each in sys.argv[1:])
say(starting=True)
executor = start(**{"executor": "ray", **keys})
failed = threading.Event()
errors = []
executor.register_failure_callback(lambda error: (errors.append(error), failed.set()))
say(workers=executor.collective_rpc(pid_of))
failed.wait()
(error,) = errors
say(failed=type(error).__name__, rank=error.rank, pid=error.pid, text=str(error))
began = time.monotonic()
executor.shutdown()
say(closed=True, seconds=time.monotonic() - began)
