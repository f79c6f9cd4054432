"""What can go wrong with graphs, by name."""

from __future__ import annotations

from hardpoint.errors import HardpointError


class GraphCaptureError(HardpointError):
    """Work inside a capture cannot be recorded: it reads values on the host, has a shape that
    depends on data, draws, or is not the same each time.

    What to do: mend the operation that the message names, or set ``graph_mode`` to a mode that
    leaves it out.
    """


class GraphBufferError(HardpointError):
    """A buffer is not the one that a graph was captured with: a replay would not see its values.

    What to do: let the platform change values in place; ``graph_mode = "none"`` runs without.
    """
