"""Every socket at which ``mp`` listens, before it does (S6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint.records import Listener

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.platform import Platform

    from hardpoint_multiproc.settings import MultiprocSettings

ALL_HERE = "all workers have connected"
KEYS = "CURVE, a key for each worker, made for the run"
UNPROTECTED = "none: the collective library has none; keep its network to these hosts"


def across_hosts(host: str, workers: str) -> tuple[Listener, ...]:
    """Return those of a group over several hosts, whose driver listens at ``host`` and whose
    workers, if they use a collective library, at ``workers``.
    """
    return (
        Listener(purpose="calls", address=f"{host}:*", owner="driver", protection=KEYS,
                 until=ALL_HERE),
        Listener(purpose="control", address=f"{host}:*", owner="driver", protection=KEYS,
                 until=ALL_HERE),
        Listener(purpose="collectives", address=f"{workers}:*", owner="each worker",
                 protection=UNPROTECTED),
    )  # fmt: skip


def of_mp(config: Config, settings: MultiprocSettings, platform: Platform) -> tuple[Listener, ...]:
    """Return those of ``mp`` as it is configured. Raises ConfigError where several hosts want more
    keys.
    """
    if config.parallel.nnodes > 1:
        from hardpoint_multiproc.hosts.start import leader_of

        host, port = leader_of(config, settings)
        join = Listener(
            purpose="join",
            address=f"{host}:{port}",
            owner="driver",
            protection="CURVE, the key of plugins.mp.key_file",
            until="all hosts have joined",
        )
        return (join, *across_hosts(host, "each host's address"))
    if platform.placement(config).num_workers > 1:
        local = Listener(
            purpose="collectives",
            address="127.0.0.1:*",
            owner="each worker",
            protection="reached from this host alone; none where the platform shares memory",
        )
        return (local,)
    return ()
