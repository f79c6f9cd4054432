"""A worker of ``rpc.pickle = "never"`` runs no function, however it came there."""

from __future__ import annotations

import pytest
from attrs import evolve
from hardpoint.checkpoints import read_description
from hardpoint.config import resolution
from hardpoint.config.loading import load_config
from hardpoint.records import WorkerContext
from hardpoint.registry import Registry
from hardpoint.rpc.calls import PackedCall
from hardpoint.rpc.codec import Carried
from hardpoint.rpc.host import WorkerHost
from hardpoint.selection import select_platform


@pytest.fixture
def make_host():
    made = []

    def make(pickle):
        settings = {
            "model": "dummy",
            "load_format": "dummy",
            "platform": "dummy",
            "executor": "uni",
            "rpc.pickle": pickle,
        }
        config = load_config(overrides=settings, environ={})
        registry = Registry.discover(config)
        platform = select_platform(registry, config)
        config = evolve(config, description=read_description("dummy", "dummy"))
        config = resolution.configure(config, registry, platform)
        config = resolution.fill_defaults(config, platform)
        context = WorkerContext(
            config=config,
            rank=0,
            local_rank=0,
            world_size=1,
            model_runner=registry.model_runner_class(config, platform),
        )
        made.append(
            WorkerHost(context, platform, registry, registry.worker_class(config, platform))
        )
        return made[-1]

    yield make
    for host in made:
        host.close()


def call(host, method, *args):
    """Have the host run a call that no codec has looked at."""
    body = Carried((method, args, {}))
    return host.handle(PackedCall(call_id=1, generation=0, name="forged", body=body))


@pytest.mark.parametrize("pickle", ["never", "local"])
def test_a_function_runs_only_where_functions_may_be_sent(make_host, pickle):
    host = make_host(pickle)
    for name in ("init_device", "load_model"):
        assert call(host, name).failure is None
    ran = []
    replies = [
        call(host, lambda worker: ran.append("method")),
        call(host, "apply_model", lambda model: ran.append("apply_model")),
    ]
    if pickle == "local":
        assert ran == ["method", "apply_model"]
        assert [reply.failure for reply in replies] == [None, None]
        return
    assert ran == []
    for reply in replies:
        assert reply.failure.type_name == "hardpoint.errors.UnsupportedError"
        assert 'rpc.pickle = "never"' in reply.failure.message
        assert reply.failure.encoded is None
