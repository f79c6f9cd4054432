"""What can go wrong with graphs, by name."""

from __future__ import annotations

from hardpoint.errors import HardpointError


class GraphCaptureError(HardpointError):
    """Work inside a capture cannot be recorded: it reads values on the host, has a shape that
    depends on data, draws, or is not the same each time.
    """


class GraphBufferError(HardpointError):
    """A buffer is not the one that a graph was captured with: a replay would not see its values."""
