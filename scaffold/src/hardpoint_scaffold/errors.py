"""What ``hardpoint new`` refuses, and why it could not write."""

from __future__ import annotations

from hardpoint.errors import HardpointError


class PluginNameError(HardpointError, ValueError):
    """A name that no new plugin can have; the message says why.

    What to do: choose another name, or one of those that the message proposes.
    """

    exit_code = 2


class ProjectFolderError(HardpointError, OSError):
    """The project's folder cannot be made; nothing of it was left behind.

    What to do: move away what is there, or run the command where you may write.
    """

    exit_code = 2
