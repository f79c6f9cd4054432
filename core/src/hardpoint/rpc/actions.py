"""What a supervisor wants done; whoever drives it does it, in the order given."""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

from hardpoint.errors import HardpointError


@frozen(kw_only=True)
class Fail:
    """Fail the executor for good, with this error; comes once."""

    error: HardpointError


@frozen(kw_only=True)
class EndCollectives:
    """Have these ranks leave whatever they wait for each other in.

    ``work`` says that they shall begin no other call either: what was sent to them is given up.
    """

    ranks: tuple[int, ...]
    work: bool = False


@frozen(kw_only=True)
class DumpStack:
    """Get the Python stack of this rank's threads and give it to :meth:`Supervisor.stack`.

    ``last`` says that its end is decided: it may do nothing else any more, so that a worker that is
    continued for its stack does not go on with its work.
    """

    rank: int
    last: bool


@frozen(kw_only=True)
class Kill:
    """End this rank's process group by SIGKILL: it must never be heard again."""

    rank: int


@frozen(kw_only=True)
class Warn:
    """Log this line."""

    text: str


Action: TypeAlias = Fail | EndCollectives | DumpStack | Kill | Warn
