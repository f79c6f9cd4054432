"""Another rank than 0 of ``launched_executor``: carries out what rank 0 wants, and ends."""

from __future__ import annotations

import pickle
import sys

from attrs import evolve


def main():
    boot = pickle.loads(sys.stdin.buffer.read())
    sys.path[:] = boot["path"]
    boot = pickle.loads(boot["boot"])
    from hardpoint.registry import Registry
    from hardpoint.selection import select_platform
    from hardpoint_external_launcher.executor import ExternalLauncherExecutor

    config = evolve(boot["config"], executor=boot["executor"])
    registry = Registry.discover(config)
    platform = select_platform(registry, config)
    ExternalLauncherExecutor.start(config, registry, platform)


main()
