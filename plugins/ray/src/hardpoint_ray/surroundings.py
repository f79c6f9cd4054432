"""What Ray reads of its surroundings while it is started or joined, and how it is kept to that."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping

ADDRESS, AUTH_MODE, TOKEN, TOKEN_PATH = (
    "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH",
)  # fmt: skip

USAGE = "RAY_USAGE_STATS_ENABLED"
"""Whether Ray reports its use to its makers: not of one that is started here, unless it is set."""

NICENESS = "RAY_worker_niceness"
"""By how much Ray's workers yield to others: 15 by itself, which has a worker of a step wait for
whatever else runs on the host. Not of a Ray that is started here, unless it is set.
"""

CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Whether Ray listens to other hosts. The name is history: it does as this says everywhere, and has
no other way to keep to the loopback address (Ray 2.60 takes 127.0.0.1 for the host's own address).
"""


def names_token() -> bool:
    """Whether the environment has a token for Ray."""
    return bool(os.environ.get(TOKEN) or os.environ.get(TOKEN_PATH))


@contextlib.contextmanager
def environment(wanted: Mapping[str, str | None]) -> Iterator[None]:
    """Have the variables ``wanted`` (None: not that one), and restore those and the one that Ray
    sets itself.
    """
    before = {name: os.environ.get(name) for name in (*wanted, AUTH_MODE)}
    _set(wanted)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def use_token() -> None:
    """Have Ray show the token that the environment names, also to a Ray that is named by address:
    by itself it does so only where AUTH_MODE was set before Ray's import.
    """
    from ray._private.authentication import authentication_token_setup

    authentication_token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


@contextlib.contextmanager
def loopback() -> Iterator[None]:
    """Have Ray listen on this host alone, as CLUSTER would, had it been set before Ray's import."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what Ray tells of its own start to itself: that there is a token, that it takes no
    signal on this thread.
    """
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
