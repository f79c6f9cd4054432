"""Host memory in the place of a device, so that a plugin's worker and runner can be tried without
one: the key ``plugins.NAME.substitute``. It says nothing of a device's own behaviour.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from hardpoint_runtime.accelerator.device import AcceleratorDeviceOps
from hardpoint_runtime.device import HostDeviceOps, MemoryInfo

if TYPE_CHECKING:
    from hardpoint_runtime.parallel.communicator import Communicator, Meeting
    from hardpoint_runtime.parallel.groups import Group

STATUS = "/proc/self/status"
