"""The Platform suite: what the driver is told, and whether it then comes true."""

from __future__ import annotations

from typing import ClassVar

from hardpoint_conformance.platform.declarations import DeclarationTests
from hardpoint_conformance.platform.devices import DeviceTests
from hardpoint_conformance.platform.promises import PromiseTests


class PlatformSuite(DeclarationTests, PromiseTests, DeviceTests):
    """Limits, placement, check, check_request, capabilities, memory, devices."""

    contract: ClassVar[str] = "platform"
