"""The port to an accelerator: what torch's device modules have in common."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from hardpoint.errors import ConfigError, LifecycleError

from hardpoint_runtime.accelerator.collectives import device_communicator
from hardpoint_runtime.accelerator.graphs import DeviceGraph, DeviceGraphPool, capture
from hardpoint_runtime.accelerator.memory import MemorySnapshot
from hardpoint_runtime.accelerator.placed_pools import PlacedPools, held_by_all
from hardpoint_runtime.device import Graph, MemoryInfo, TorchDeviceOps

if TYPE_CHECKING:
    from hardpoint_runtime.accelerator.pools import AddressKeepingPools
    from hardpoint_runtime.accelerator.virtual_memory import VirtualMemory
    from hardpoint_runtime.parallel.communicator import Communicator, Meeting
    from hardpoint_runtime.parallel.groups import Group


class AcceleratorDeviceOps(TorchDeviceOps):
    """The port over ``torch.get_device_module(name)`` of a device with memory of its own, streams
    and events. Work is given to it, and goes on after the call has returned.

    A plugin sets :attr:`graph_class`, :attr:`collectives` and :attr:`workspaces`, and overrides
    :meth:`make_virtual_memory`, or :meth:`make_pools` as a whole.
    """

    graph_class: ClassVar[str | None] = None
    """The name, in the device's module, of its graphs (``capture_begin(pool=...)``, with or without
    ``capture_error_mode``, ``capture_end()``, ``replay()``, ``pool()``); None: graphs are recorded
    lists of operations.
    """
    collectives: ClassVar[str | None] = None
    """The backend of torch.distributed for the device's tensors; None: they go through the host."""
    workspaces: ClassVar[str | None] = None
    """The name, in ``torch._C``, of what clears libraries' work space; None: there is none."""

    def __init__(
        self, name: str, index: int = 0, *, pins: bool = True, sleeps: bool = True
    ) -> None:
        super().__init__(name, index, pins=pins)
        self.sleeps = sleeps
        """Whether what is allocated under a tag lies in pools; else in torch's own memory."""

    # Collaborators: override one to change a part.

    def make_pools(self) -> AddressKeepingPools | None:
        """Build what memory is allocated from that can sleep; None: this device has none, and
        ``sleep`` is refused. Called once, at the first allocation under a tag. By default, pools
        over :meth:`make_virtual_memory`.
        """
        memory = self.make_virtual_memory()
        if memory is None:
            return None
        return PlacedPools(
            memory,
            self.device,
            self.host_buffer,
            synchronize=self.synchronize,
            give_back=self.empty_cache,
        )

    def make_virtual_memory(self) -> VirtualMemory | None:
        """Build the port to the driver's virtual memory; None: there is no way to it."""
        return None

    def make_communicator(self, group: Group, meeting: Meeting) -> Communicator:
        """By the library :attr:`collectives`."""
        if self.collectives is None:
            return super().make_communicator(group, meeting)
        return device_communicator(self, group, meeting, self.collectives)

    def make_graph(self) -> Any:
        """Return an empty graph of the device. Raises UnsupportedError without
        :attr:`graph_class`.
        """
        if self.graph_class is None:
            self._unsupported("graphs of its own")
        return self._call(self.graph_class)

    # Taking the device.

    def set_device(self) -> None:
        """Make the device current. Raises ConfigError for one that this process does not see, and
        LifecycleError where it was forked after its parent had taken the device.
        """
        if self.forked_too_late:
            raise LifecycleError(
                f"this process was forked of one that had taken {self.device.type} devices, and "
                "can use none: start workers before the device is used, or plugins.mp.start = "
                "'plain'"
            )
        index = self.device.index or 0
        if index >= (count := self.count()):
            raise ConfigError(
                f"device {index} of {self.device.type} is asked for (by the key devices, or as the "
                f"worker of that number on this host), and this process sees {count}"
            )
        super().set_device()

    def count(self) -> int:
        """Return how many devices of the kind this process sees."""
        return int(self._call("device_count"))

    @property
    def forked_too_late(self) -> bool:
        """Whether this process was forked of one whose device was taken already, so that it cannot
        have it.
        """
        asked = getattr(self._module, "_is_in_bad_fork", None)
        return bool(asked()) if asked is not None else False

    # Memory.

    @functools.cached_property
    def pools(self) -> AddressKeepingPools | None:
        """What :meth:`make_pools` made; None where nothing is to sleep."""
        return self.make_pools() if self.sleeps else None

    def memory_info(self) -> MemoryInfo:
        """Ask the device module's ``mem_get_info``."""
        free, total = self._call("mem_get_info", self.device)
        return MemoryInfo(free=free, total=total)

    def memory_allocated(self) -> int:
        """Ask the device module's ``memory_allocated``; pools hold what is awake beside it."""
        return super().memory_allocated() + self.in_pools

    def memory_reserved(self) -> int:
        """Return what torch's allocator and pools have taken of the device for this process,
        whether or not tensors use it.
        """
        if not hasattr(self._module, "memory_reserved"):
            return self.memory_allocated()
        return int(self._call("memory_reserved", self.device)) + self.in_pools

    def memory_held(self) -> int:
        """Return what is in use of the device, by whomever: graphs hold memory beside the
        allocator's.
        """
        self.synchronize()
        info = self.memory_info()
        return info.total - info.free

    @property
    def rounding(self) -> int:
        """The most bytes that one allocation under a tag loses to the size of pages."""
        return 0 if self.pools is None else self.pools.rounding

    @property
    def in_pools(self) -> int:
        """The bytes that pools of this process hold of the device, beside torch's own figures."""
        return held_by_all(self.device)

    def snapshot(self) -> MemorySnapshot:
        """Return the figures of this moment, when all work is done."""
        self.synchronize()
        info = self.memory_info()
        return MemorySnapshot(
            free=info.free,
            total=info.total,
            reserved=self.memory_reserved(),
            allocated=self.memory_allocated(),
        )

    def peak_memory(self, run: Callable[[], object]) -> int:
        """Call ``run()``; return the most that torch's allocator held meanwhile, pieces that no
        tensor fits into included, and the most that pools did. What it kept unused before is given
        back first.
        """
        self.empty_cache()
        self._call("reset_peak_memory_stats", self.device)
        pools = self.pools
        if isinstance(pools, PlacedPools):
            pools.most = self.in_pools
        run()
        self.synchronize()
        name = "max_memory_reserved"
        if not hasattr(self._module, name):
            name = "max_memory_allocated"
        in_pools = pools.most if isinstance(pools, PlacedPools) else self.in_pools
        return int(self._call(name, self.device)) + in_pools

    def empty_cache(self) -> None:
        """Give back to the device what the allocator keeps and no tensor uses."""
        if hasattr(self._module, "empty_cache"):
            self._call("empty_cache")

    def release_workspaces(self) -> None:
        """Make torch give up what it keeps for libraries that compute: taken during a capture, it
        lies in the private memory of graphs and holds that. Called while no graph lives, as graphs
        use it.
        """
        clear = getattr(torch._C, self.workspaces or "", None)  # noqa: SLF001
        if clear is not None:
            clear()

    def pool(self, tag: str) -> contextlib.AbstractContextManager[object]:
        """Allocate from the pool of ``tag``, where there are pools."""
        return contextlib.nullcontext() if self.pools is None else self.pools.use(tag)

    # Graphs.

    def graph_pool(self) -> Any:
        """Return the private memory of the device's graphs, which they share."""
        return super().graph_pool() if self.graph_class is None else DeviceGraphPool(self)

    def capture(
        self,
        function: Callable[[], Any],
        key: Hashable,
        *,
        pool: Any = None,
        rehearsal: Callable[[], Any] | None = None,
    ) -> Graph:
        """Capture on a stream of its own, into ``pool``; see
        :mod:`hardpoint_runtime.accelerator.graphs`.
        """
        if self.graph_class is None:
            return super().capture(function, key, pool=pool, rehearsal=rehearsal)
        return capture(self, function, key, pool or self.graph_pool(), rehearsal)

    def replay(self, graph: Any) -> Any:
        """Launch the graph on the current stream."""
        if isinstance(graph, DeviceGraph):
            return graph.replay()
        return super().replay(graph)
