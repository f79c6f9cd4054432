"""Every socket at which something listens for ranks of a launcher, before it does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hardpoint.errors import ConfigError
from hardpoint.records import Listener

from hardpoint_external_launcher.launchers import ADDRESS, PORT, TORCHRUN, seat_of
from hardpoint_external_launcher.settings import ExternalLauncherSettings

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.platform import Platform

OPEN = (
    "none of the launcher's; what the ranks write there is sealed by their key file, and strangers "
    "can keep them from meeting, until plugins.external_launcher.start_timeout ends them"
)


def of_ranks(
    config: Config, platform: Platform, environ: Mapping[str, str]
) -> tuple[Listener, ...]:
    """Return those of a run that a launcher starts with ``environ``; before there is a launcher,
    the meeting place is known by its variables' names alone.
    """
    if platform.placement(config).num_workers == 1:
        return ()
    settings = config.settings_of("external_launcher")
    if isinstance(settings, ExternalLauncherSettings) and settings.key_file is not None:
        own = settings.address or f"the address towards {ADDRESS}"
        return _store(environ), *_abroad(own)
    store = Listener(
        purpose="rendezvous store",
        address="a Unix socket without a file",
        owner="rank 0",
        protection="this host's processes of this user alone, as the system tells whose they are",
        until="all ranks have met",
    )
    collectives = Listener(
        purpose="collectives",
        address="127.0.0.1:*",
        owner="each worker",
        protection="reached from this host alone; none where the platform shares memory",
    )
    return store, collectives


def _store(environ: Mapping[str, str]) -> Listener:
    place, port, served = f"{ADDRESS}:{PORT}", PORT, TORCHRUN.signs[0] in environ
    try:
        seat = seat_of(environ)
        place, port, served = f"{seat.address}:{seat.port}", str(seat.port), seat.hosts_store
    except ConfigError:
        pass
    if served:
        return Listener(
            purpose="rendezvous store",
            address=f"*:{port}",
            owner=TORCHRUN.name,
            protection=OPEN,
        )
    return Listener(
        purpose="rendezvous store",
        address=place,
        owner="rank 0, unless torchrun serves its own there, open to anybody",
        protection="CURVE, by the keys of the key file",
        until="all ranks have met",
    )


def _abroad(address: str) -> tuple[Listener, Listener]:
    ranks = Listener(
        purpose="ranks of other hosts",
        address=f"{address}:*",
        owner="each rank",
        protection="CURVE, a key for each rank, made for the run and sealed by the key file",
        until="all of them have connected, and with rank 0 all that use its store",
    )
    collectives = Listener(
        purpose="collectives",
        address=f"{address}:*",
        owner="each worker",
        protection="none: the collective library has none; keep its network to these hosts",
    )
    return ranks, collectives
