"""The keys ``plugins.external_launcher.*``."""

from __future__ import annotations

from attrs import frozen
from hardpoint.config.schema import key

KEY_FILE = "plugins.external_launcher.key_file"
ADDRESS = "plugins.external_launcher.address"
START_TIMEOUT = "plugins.external_launcher.start_timeout"
"""The key that an error of a meeting that takes too long names."""


@frozen(kw_only=True)
class ExternalLauncherSettings:
    """How the processes of a launcher work together."""

    driver_only: bool = key(
        False, "rank 0 alone plans steps, and the other ranks only carry them out"
    )
    compare_plans: int = key(1, "compare the ranks' plans at every so many steps; 0: never", low=0)
    start_timeout: float = key(
        120.0, "seconds for which a process waits for the others of its launcher", above=0
    )
    key_file: str | None = key(
        None, "the file by which ranks on several hosts know each other; rank 0 makes it if need be"
    )
    address: str | None = key(
        None,
        "this host's address for ranks on other hosts; unset: that from which MASTER_ADDR is "
        "reached",
    )
    peer_timeout: float = key(
        10.0, "seconds after which a silent connection to another host is given up", above=0
    )
    warn_after: float = key(
        60.0, "seconds after which a worker that is still busy with a call is told of", above=0
    )
    hang_after: float | None = key(
        None, "seconds of one call after which a worker is given up; unset: never", above=0
    )
