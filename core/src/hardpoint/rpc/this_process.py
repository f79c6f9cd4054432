"""Which process this is, known without asking the system.

Every call asks whether it runs in the process that it was made for. Asking the system costs as much
as the rest of such a check; so the number is kept, and a forked child learns its own. It is a fact
of the process, as the claims of :mod:`hardpoint.rpc.exclusive` are.
"""

from __future__ import annotations

import os


class _ThisProcess:
    """``pid``, kept up to date whenever Python forks."""

    pid: int

    def __init__(self) -> None:
        self._learn()
        os.register_at_fork(after_in_child=self._learn)

    def _learn(self) -> None:
        self.pid = os.getpid()


THIS = _ThisProcess()
