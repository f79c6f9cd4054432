"""What ``hardpoint new`` refuses, and why it could not write."""

from __future__ import annotations

from hardpoint.errors import HardpointError


class PluginNameError(HardpointError, ValueError):
    """A name that no new plugin can have; the message says why, and what can be done."""

    exit_code = 2


class ProjectFolderError(HardpointError, OSError):
    """The project's folder cannot be made; nothing of it was left behind."""

    exit_code = 2
