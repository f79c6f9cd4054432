"""What uni cannot give, it says: variables for the worker; and a loop that ended is a death."""

from __future__ import annotations

import threading

import pytest
from attrs import evolve
from hardpoint.checkpoints import read_description
from hardpoint.config import resolution
from hardpoint.config.loading import load_config
from hardpoint.errors import ConfigError, ExecutorFailedError, WorkerDiedError
from hardpoint.registry import Registry
from hardpoint.selection import select_executor, select_platform


def prepare():
    settings = {
        "model": "dummy",
        "load_format": "dummy",
        "platform": "dummy",
        "executor": "uni",
    }
    config = load_config(overrides=settings, environ={})
    registry = Registry.discover(config)
    platform = select_platform(registry, config)
    config = evolve(config, description=read_description("dummy", "dummy"))
    config = resolution.fill_defaults(resolution.configure(config, registry, platform), platform)
    return select_executor(registry, config, platform), config, registry, platform


def start(monkeypatch, wanted, plugin_wanted):
    executor_class, config, registry, platform = prepare()
    monkeypatch.setattr(platform, "environment", lambda config, placement: wanted)
    monkeypatch.setattr(registry, "worker_env", lambda config, rank: plugin_wanted)
    with executor_class.start(config, registry, platform) as executor:
        return executor.collective_rpc("supported_tasks")


def test_every_variable_that_differs_is_named_with_the_way_out(monkeypatch):
    monkeypatch.setenv("ACME_MODE", "slow")
    with pytest.raises(ConfigError) as caught:
        start(monkeypatch, {"ACME_MODE": "fast"}, {"ACME_UNIT": "3"})
    message = str(caught.value)
    assert "needs ACME_MODE='fast', and this process has 'slow'" in message
    assert "needs ACME_UNIT='3', and this process has None" in message
    assert "Start it with ACME_UNIT=3, or use executor = 'mp'" in message
    assert [problem.key for problem in caught.value.problems] == ["executor", "executor"]


def test_variables_that_agree_are_fine(monkeypatch):
    monkeypatch.setenv("ACME_MODE", "fast")
    assert start(monkeypatch, {"ACME_MODE": "fast"}, {})


def test_a_loop_that_ends_is_told_as_the_workers_death(monkeypatch):
    executor_class, config, registry, platform = prepare()
    with executor_class.start(config, registry, platform) as executor:
        heard = []
        executor.register_failure_callback(heard.append)
        executor.register_failure_callback(leave)

        def broken(reply):
            raise WithoutNotesError(5)

        RELEASE.clear()
        blocked = executor.collective_rpc(hold, non_block=True)
        monkeypatch.setattr(executor.calls, "deliver", broken)
        RELEASE.set()
        death = blocked.exception(60)
        assert isinstance(death, WorkerDiedError)
        assert isinstance(death.__cause__, WithoutNotesError)
        assert heard == [death]
        with pytest.raises(ExecutorFailedError, match="worker rank 0"):
            executor.check_health()


def test_a_callback_that_raises_ends_no_worker():
    executor_class, config, registry, platform = prepare()
    with executor_class.start(config, registry, platform) as executor:
        for _ in range(2):
            future = executor.collective_rpc("supported_tasks", non_block=True)
            future.add_done_callback(leave)
            assert executor.collective_rpc("supported_tasks", timeout=20) == future.result(60)
        executor.check_health()


def leave(_):
    raise SystemExit(5)  # what a careless callback can do to the thread that calls it


class WithoutNotesError(BaseException):
    """Its traceback cannot be told."""

    @property
    def __notes__(self):
        raise SystemExit(9)


RELEASE = threading.Event()


def hold(worker):
    RELEASE.wait(60)
