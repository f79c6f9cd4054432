"""Variables that a worker needs cannot be set in the driver's own process: uni says so."""

from __future__ import annotations

import pytest
from attrs import evolve
from hardpoint.checkpoints import read_description
from hardpoint.config import resolution
from hardpoint.config.loading import load_config
from hardpoint.errors import ConfigError
from hardpoint.registry import Registry
from hardpoint.selection import select_executor, select_platform


def start(monkeypatch, wanted, plugin_wanted):
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
    monkeypatch.setattr(platform, "environment", lambda config, placement: wanted)
    monkeypatch.setattr(registry, "worker_env", lambda config, rank: plugin_wanted)
    executor_class = select_executor(registry, config, platform)
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
