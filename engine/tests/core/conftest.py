"""Engines on the dummy platform, each shut down at the end of its test."""

from __future__ import annotations

import threading
import time

import pytest
from hardpoint.config.loading import load_config
from hardpoint.sampling_params import SamplingParams
from hardpoint_engine.build import start_engine
from hardpoint_engine.request import EngineRequest


class Engine:
    """A core, and what came out of it for each request."""

    def __init__(self, *, dummy=None, registry=None, **keys):
        keys = {"block_size": 4, "num_kv_blocks": 65, **keys}
        plugins = {"dummy": dict(dummy or {})}
        config = load_config(
            overrides={
                "platform": "dummy",
                "load_format": "dummy",
                "plugins": plugins,
                **keys,
            },
            environ={},
        )
        self.core = start_engine(config, registry=registry)
        self.tokens = {}
        self.ends = {}
        self.outputs = []

    def add(self, req_id, prompt, *, max_tokens=8, **options):
        fields = ("priority", "cache_salt", "lora", "prompt_adapter")
        more = {name: options.pop(name) for name in fields if name in options}
        sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0, **options})
        request = EngineRequest(
            req_id=req_id, prompt=prompt, sampling=sampling, arrival=time.monotonic(), **more
        )
        self.core.add_request(request)
        self.tokens[req_id] = ()

    def step(self):
        outputs = self.core.step()
        for output in outputs:
            assert output.req_id not in self.ends, "nothing follows the end"
            self.outputs.append(output)
            self.tokens[output.req_id] += output.new_tokens
            if output.finish_reason:
                self.ends[output.req_id] = output
        return outputs

    def run(self):
        for _ in range(20_000):
            if not self.core.has_unfinished():
                return self
            self.step()
        raise AssertionError("requests never end")

    def ask(self, prompt, **options):
        """Run one request alone and return its tokens."""
        req_id = f"ask-{len(self.tokens)}"
        self.add(req_id, prompt, **options)
        self.run()
        return self.tokens[req_id]

    def calls(self, name):
        """What the worker's methods of this name were called with."""
        (calls,) = self.core.executor.collective_rpc(recorded)
        return [detail for called, detail in calls if called == name]


def recorded(worker):
    return worker.record.calls


def worker_threads():
    return [thread for thread in threading.enumerate() if thread.name == "hardpoint-uni"]


@pytest.fixture
def engine():
    """Return a function that starts engines; nothing of them is left at the end."""
    started = []

    def start(**keys):
        started.append(Engine(**keys))
        return started[-1]

    yield start
    for each in started:
        each.core.shutdown()
    assert not worker_threads()


@pytest.fixture(scope="session")
def threads_of_workers():
    return worker_threads
