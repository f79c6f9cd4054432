"""What can go wrong between ranks. Every error names the group, the operation and the ranks."""

from __future__ import annotations

from hardpoint.errors import HardpointError


class CollectiveError(HardpointError):
    """Ranks could not exchange tensors.

    ``group`` and ``operation`` by name; ``ranks`` of the world that are to blame, empty where
    nobody is known.

    What to do: see the ranks that the message names, and their own errors; the executor is over.
    """

    def __init__(
        self, message: str, *, group: str, operation: str, ranks: tuple[int, ...] = ()
    ) -> None:
        super().__init__(f"{operation} in group {group}: {message}")
        self.group = group
        self.operation = operation
        self.ranks = ranks


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A peer did not come in time.

    What to do: look for what became of the peer; raise ``collective_timeout`` where it is only
    slow.
    """

    consequence = True


class PeerLostError(CollectiveError):
    """A peer's process ended, or it left the group.

    What to do: look for the peer's own error; start a new engine.
    """

    consequence = True


class CollectiveEndedError(CollectiveError):
    """The group was ended from outside (``Communicator.end``), because a peer will never come.

    What to do: nothing by itself: look for the first error, of which this is a consequence.
    """

    consequence = True


class CollectiveMismatchError(CollectiveError):
    """Ranks came with different operations or sizes: a defect, or ranks that decided differently
    on a step.

    What to do: report it: ranks that run one plan must come with the same operations.
    """
