"""The rocm worker."""

from __future__ import annotations

import logging
from typing import ClassVar

from hardpoint_runtime.accelerator.worker import AcceleratorWorker

from hardpoint_rocm.device import RocmDeviceOps, RocmGroupDeviceOps

_logger = logging.getLogger("hardpoint.worker")


class RocmWorker(AcceleratorWorker):
    """One rank on one AMD GPU."""

    device_type: ClassVar[str] = "cuda"

    def port_class(self) -> type[RocmDeviceOps]:
        """Return what this rank's port is, and tell why steps run without graphs by default."""
        if self.config.parallel.tensor_parallel_size == 1:
            return RocmDeviceOps
        if self.config.graph.graph_mode is None:
            _logger.info(
                "rank %d: graph_mode is none: with tensor_parallel_size above 1, graphs would hold "
                "collectives, and HIP may end their capture when torch's watchdog of these asks "
                "for an event; a graph_mode that is set is tried all the same", self.rank,
            )  # fmt: skip
        return RocmGroupDeviceOps
