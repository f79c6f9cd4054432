"""What the system refused, told with the limit that is behind it."""

from __future__ import annotations

import errno
import resource

from hardpoint.errors import ExecutorFailedError

_LIMITS = {
    errno.EMFILE: (resource.RLIMIT_NOFILE, "open files", "ulimit -n"),
    errno.EAGAIN: (resource.RLIMIT_NPROC, "processes and threads", "ulimit -u"),
    errno.ENOMEM: (resource.RLIMIT_AS, "memory", "ulimit -v, in KiB"),
}

_NO_THREAD = "start new thread"
"""Python tells no more than that where a thread was refused."""


def is_refusal(error: OSError | RuntimeError) -> bool:
    """Whether it was the system that said no."""
    return isinstance(error, OSError) or _NO_THREAD in str(error)


def refused(error: OSError | RuntimeError) -> ExecutorFailedError:
    """Return what a start shall raise for ``error``, which is a refusal."""
    number = error.errno if isinstance(error, OSError) else errno.EAGAIN
    way_out = ""
    if number in _LIMITS:
        kind, what, command = _LIMITS[number]
        limit, unlimited = resource.getrlimit(kind)[0], resource.RLIM_INFINITY
        if limit != unlimited:
            now = limit // 1024 if kind == resource.RLIMIT_AS else limit
            way_out = f"; raise the limit of {what} ({command}), which is {now}, or start fewer"
    return ExecutorFailedError(f"the workers could not be started: {error}{way_out}")
