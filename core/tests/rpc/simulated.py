"""Groups of the dummy platform in a simulated world, for the tests beside this file."""

from __future__ import annotations

import functools

from attrs import evolve
from hardpoint.checkpoints import read_description
from hardpoint.config import resolution
from hardpoint.config.loading import load_config
from hardpoint.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheTensor
from hardpoint.registry import Registry
from hardpoint.selection import select_platform
from hardpoint.simulation.executor import World


@functools.cache
def parts(world_size):
    """Return (config, registry, platform) of a group: none of them changes."""
    settings = {
        "model": "dummy",
        "load_format": "dummy",
        "platform": "dummy",
        "block_size": 4,
        "max_model_len": 64,
        "plugins.dummy.num_workers": world_size,
    }
    config = load_config(overrides=settings, environ={})
    registry = Registry.discover(config)
    platform = select_platform(registry, config)
    config = evolve(config, description=read_description("dummy", "dummy"))
    config = resolution.configure(config, registry, platform)
    return resolution.fill_defaults(config, platform), registry, platform


def start(world: World, world_size=3):
    """Return an executor of ``world`` whose workers can execute."""
    executor = world.executor_class().start(*parts(world_size))
    plans = []
    for specs in executor.get_kv_cache_specs():
        tensors = [
            KVCacheTensor(num_bytes=17 * each.page_bytes, layers=(layer,))
            for layer, each in specs.items()
        ]
        group = KVCacheGroup(layers=tuple(specs), spec=next(iter(specs.values())))
        plans.append(KVCacheConfig(num_blocks=17, groups=(group,), tensors=tuple(tensors)))
    executor.initialize_cache(plans)
    return executor


def answer(worker, token):
    """What a call is asked for, with all by which its answer can be told from any other."""
    return token, worker.rank, worker.context.generation


def meet(worker, token):
    """As ``answer``, after every rank has come to it; see Work.meetings."""
    return token, worker.rank, worker.context.generation


def err(worker, token, ranks):
    """As ``answer``, but ``ranks`` raise."""
    if worker.rank in ranks:
        raise ValueError(token, worker.rank, worker.context.generation)
    return token, worker.rank, worker.context.generation


def err_or_meet(worker, token, ranks):
    """As ``err``; the ranks that do not raise wait for all others."""
    return err(worker, token, ranks)
