"""The keys ``plugins.mp.*``."""

from __future__ import annotations

from attrs import frozen
from hardpoint.config.schema import key

START_TIMEOUT = "plugins.mp.start_timeout"
"""The key that an error of a start that takes too long names."""


@frozen(kw_only=True)
class MultiprocSettings:
    """How worker processes are started, called and watched."""

    start: str = key(
        "auto",
        "how a worker's process begins: forked by a preloaded nursery, or a plain interpreter",
        choices=("auto", "nursery", "plain"),
    )
    channel: str = key(
        "auto",
        "what carries calls; auto: shared memory on x86, zmq on other processors",
        choices=("auto", "shared_memory", "zmq"),
    )
    start_timeout: float = key(
        120.0, "seconds for which no worker may come any further while it starts and loads", above=0
    )
    warn_after: float = key(
        60.0, "seconds after which a worker that is still busy with a call is told of", above=0
    )
    hang_after: float | None = key(
        None, "seconds of one call after which a worker is given up; unset: never", above=0
    )
    leader: str | None = key(
        None,
        "with nnodes: address and port, HOST:PORT, at which this host, the leader, lets the others "
        "join",
    )
    key_file: str | None = key(
        None,
        "with nnodes: file with the keys by which hosts know each other, made if it is not there",
    )
    peer_timeout: float = key(
        10.0, "seconds without a sign of life after which another host counts as gone", above=0
    )
    bind: bool = key(
        True, "keep each worker on cores of its own, where there are enough and none else does so"
    )
