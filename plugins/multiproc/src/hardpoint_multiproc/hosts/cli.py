"""``hardpoint worker``: one host's share of a group that another host leads."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click
from attrs import evolve
from hardpoint.cli_options import configuration_options, given_flags

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.registry import Registry


@click.command(short_help="Run this host's share of the workers of a leader on another host.")
@click.option("--join", "leader", required=True, metavar="HOST:PORT", help="where the leader is")
@click.option(
    "--key-file", required=True, type=click.Path(path_type=Path), help="the leader's key file"
)
@click.option("--node-rank", type=int, default=None, metavar="N", help="1 and up; unset: the next")
@click.option("--address", default="", metavar="HOST", help="this host's address for the others")
@click.option(
    "--wait", default=120.0, show_default=True, help="seconds for which the leader is awaited"
)
@configuration_options
def worker(
    leader: str, key_file: Path, node_rank: int | None, address: str, wait: float, **options: Any
) -> None:
    """Join the leader at HOST:PORT, which runs with --nnodes, and run this host's workers until it
    ends. What is configured here must agree with the leader.
    """
    from hardpoint.config.loading import load_config
    from hardpoint.config.resolution import effective
    from hardpoint.errors import ConfigError
    from hardpoint.registry import Registry
    from hardpoint.rpc.network.addresses import explicit, of_this_host, split
    from hardpoint.rpc.network.key_file import awaited

    from hardpoint_multiproc.executor import settings_of
    from hardpoint_multiproc.hosts import handshake
    from hardpoint_multiproc.hosts.follower import joined

    try:
        host, port = split(leader)
    except ValueError as error:
        raise ConfigError(f"--join: {error}") from error
    config = load_config(
        flags=given_flags(options), file=options["config_file"], sets=options["sets"]
    )
    registry = Registry.discover(config)
    settings = settings_of(config, registry)
    config = _structured(config, registry)
    own = handshake.installation(
        registry.plugins,
        ((path, value) for path, value, _ in effective(config) if config.is_explicit(path)),
    )
    keys = awaited(key_file, wait)
    signal.signal(signal.SIGTERM, _leave)
    follower = joined(
        (explicit(host), port),
        keys,
        own,
        node_rank=node_rank,
        address=of_this_host(address, "--address") if address else "",
        peer_timeout=settings.peer_timeout,
        start=settings.start,
        wait=wait,
    )
    why = "it was interrupted"
    try:
        click.echo(f"joined {leader}; ranks here: {', '.join(map(str, follower.ranks))}", err=True)
        follower.run()
        why = ""
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"
        raise
    finally:
        follower.close(why)


def _structured(config: Config, registry: Registry) -> Config:
    """Return the configuration with the settings of every plugin that is here as the leader has
    them: read as what they are, not as text.
    """
    settings = dict(config.plugins.settings)
    for name, raw in config.plugins.settings.items():
        for kind in ("platform", "executor", "extension"):
            if registry.has(kind, name):
                own = registry.settings(kind, name)
                settings[name] = raw if own is None else own
    return evolve(config, plugins=evolve(config.plugins, settings=settings))


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)
