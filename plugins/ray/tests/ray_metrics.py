"""A driver for tests of metrics: runs three steps on two actors, reads what Ray exports of them at
its own port, then has the executor fail and reads again. Prints each reading, a JSON line, and the
addresses at which it and all of its Ray listen.
"""

import json
import sys
import time
import urllib.request

import psutil
import ray
from hardpoint.messages import NewRequestData, SchedulerOutput
from hardpoint.sampling_params import SamplingParams
from hardpoint_conformance.subject import plans
from ray_start import start

PATIENCE = 120.0


def samples():
    """Return what Ray exports of ours: name and labels -> value."""
    (node,) = ray.nodes()
    url = f"http://127.0.0.1:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("ray_hardpoint_"))
    return {name: float(value) for name, value in pairs}


def reading(enough):
    """Read until there is as much as ``enough(samples)`` says, or patience ends."""
    end, found = time.monotonic() + PATIENCE, {}
    while time.monotonic() < end:
        try:
            found = samples()
        except OSError:
            found = {}
        if enough(found):
            break
        time.sleep(0.2)
    print(json.dumps(found), flush=True)


def addresses():
    """Return the addresses at which this process and its descendants listen."""
    found = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            connections = process.net_connections(kind="tcp")
        except psutil.Error:
            continue
        found |= {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
    return sorted(found)


def total(found, name):
    return sum(value for each, value in found.items() if each.startswith(f"ray_hardpoint_{name}"))


def step(number, **more):
    request = NewRequestData(
        req_id=f"r{number}",
        prompt=(5, 6, 7),
        block_ids=((1, 2),),
        sampling=SamplingParams(temperature=0, seed=1),
    )
    return SchedulerOutput(
        step_id=number, new=(request,), num_tokens={request.req_id: 3}, total_tokens=3, **more
    )


keys = {"block_size": 4, "max_model_len": 64, "plugins.ray.metrics": True}
executor = start(sys.argv[1], **{"plugins.ray.address": "local"}, **keys)
executor.initialize_cache(plans(executor, 32))
executor.execute_model(step(1))
executor.execute_model(step(2), non_block=True).result()
executor.sample_tokens(executor.execute_model(step(3, defer_sampling=True)))
reading(lambda found: total(found, "steps") >= 3)
print(json.dumps({"addresses": addresses()}), flush=True)
ray.kill(executor._resources.nursery._actors[1].handle)
reading(lambda found: total(found, "failures") >= 1)
executor.shutdown()
