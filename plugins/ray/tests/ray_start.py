"""How the drivers of the tests, programs beside this file, start an executor of Ray."""

from attrs import evolve
from hardpoint.checkpoints import read_description
from hardpoint.config import resolution
from hardpoint.config.loading import load_config
from hardpoint.registry import Registry
from hardpoint.selection import select_executor, select_platform


def start(executor, **keys):
    """Start ``executor`` on the dummy platform, with two workers unless ``keys`` say otherwise."""
    settings = {
        "model": "dummy",
        "load_format": "dummy",
        "platform": "dummy",
        "executor": executor,
        "plugins.dummy.num_workers": 2,
        **keys,
    }
    config = load_config(overrides=settings, environ={})
    registry = Registry.discover(config)
    platform = select_platform(registry, config)
    config = evolve(config, description=read_description("dummy", "dummy"))
    config = resolution.configure(config, registry, platform)
    config = resolution.fill_defaults(config, platform)
    chosen = select_executor(registry, config, platform)
    config = resolution.structure_plugins(config, registry)
    return chosen.start(config, registry, platform)
