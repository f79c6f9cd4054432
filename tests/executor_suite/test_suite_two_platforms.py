"""Two engines on two platforms live in one process, and leave it as they found it."""

from __future__ import annotations

import os

from hardpoint.config.loading import load_config
from hardpoint.sampling_params import SamplingParams
from hardpoint_engine.build import start_engine
from hardpoint_engine.request import EngineRequest

SAMPLING = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def started(platform):
    keys = {"platform": platform, "load_format": "dummy", "num_kv_blocks": 9, "max_model_len": 64}
    return start_engine(load_config(overrides={**keys, "seed": 5}, environ={}))


def answers(cores, req_id):
    """The tokens of one request to each core, their steps taken in turn."""
    tokens = [[] for _ in cores]
    for core in cores:
        core.add_request(
            EngineRequest(req_id=req_id, prompt=(1, 2, 3), sampling=SAMPLING, arrival=0.0)
        )
    while any(core.has_unfinished() for core in cores):
        for core, got in zip(cores, tokens, strict=True):
            for output in core.step() if core.has_unfinished() else ():
                assert output.error is None
                got.extend(output.new_tokens)
    return tokens


def test_two_platforms_serve_two_engines_in_one_process():
    environment = dict(os.environ)
    alone = []
    for platform in ("cpu", "dummy"):
        core = started(platform)
        alone += answers([core], "alone")
        core.shutdown()
    cores = [started(platform) for platform in ("cpu", "dummy")]
    try:
        assert answers(cores, "together") == alone
        assert [len(tokens) for tokens in alone] == [6, 6]
        assert [core.executor.platform.name for core in cores] == ["cpu", "dummy"]
        for one, other in zip(cores, reversed(cores), strict=True):
            assert one.registry is not other.registry
            assert [plugin.name for plugin in one.registry.used("platform")] == [
                one.executor.platform.name
            ]
        cores[0].executor.fail(RuntimeError("the unit is gone"))
        assert answers(cores[1:], "after a failure next door") == alone[1:]
    finally:
        for core in cores:
            core.shutdown()
    assert dict(os.environ) == environment
