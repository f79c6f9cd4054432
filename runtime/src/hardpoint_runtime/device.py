"""DeviceOps: the one small port between the toolkit and a torch device.

The runtime asks the port for whatever differs between devices; the implementations live in the
platform plugins, in the worker's process. :class:`TorchDeviceOps` serves any device that has a
torch device module (``torch.get_device_module(name)``); :class:`HostDeviceOps` is for host memory.
Runtime code never pins memory, opens a stream or seeds a generator but through the port.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

import numpy as np
import torch
from attrs import frozen
from hardpoint.errors import UnsupportedError

from hardpoint_runtime.staged_copies import Fetch, StagedCopies

if TYPE_CHECKING:
    from hardpoint_runtime.attention.metadata import AttentionMetadata
    from hardpoint_runtime.graphs.programs import StepProgram
    from hardpoint_runtime.graphs.recorded import GraphPool
    from hardpoint_runtime.model_runner import TorchModelRunner
    from hardpoint_runtime.parallel.communicator import Communicator, Meeting
    from hardpoint_runtime.parallel.groups import Group

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
}
"""torch's dtypes by the names used in configuration and messages."""

HostArray = Sequence[int] | np.ndarray[Any, Any] | torch.Tensor
"""Integers on the host: a sequence, a numpy array or a host tensor."""


@frozen(kw_only=True)
class MemoryInfo:
    """A device's memory in bytes: free for this process now, and in all."""

    free: int
    total: int


class Graph(Protocol):
    """What ``DeviceOps.capture`` returns. ``output`` is what the captured function returned; a
    replay writes the same memory.
    """

    @property
    def output(self) -> Any:
        """See above."""


class DeviceOps(ABC):
    """What the toolkit needs from one device. Built and owned by a worker, used on its thread only.

    ``device`` is where tensors live. A method that a device cannot offer raises UnsupportedError
    naming it; nothing falls back in silence.
    """

    device: torch.device

    # Taking the device.

    @abstractmethod
    def set_device(self) -> None:
        """Make :attr:`device` the current one of this thread. Called by ``Worker.init_device``."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed the device's own generators. Tokens never depend on them: draws are keyed by
        request.
        """

    def inference(self) -> contextlib.AbstractContextManager[object]:
        """Return the gradient mode in which models run."""
        return torch.inference_mode()

    # Memory.

    @abstractmethod
    def memory_info(self) -> MemoryInfo:
        """Return the device's memory. Called by ``Worker.determine_available_memory``."""

    @abstractmethod
    def memory_allocated(self) -> int:
        """Return the bytes that this process holds on the device now."""

    def memory_held(self) -> int:
        """Return the bytes that are in use, as far as the device can tell: what graphs take is the
        growth of this. Here: what :meth:`memory_allocated` says.
        """
        return self.memory_allocated()

    def peak_memory(self, run: Callable[[], object]) -> int:
        """Call ``run()``; return the most bytes that this process held on the device meanwhile.

        Called by ``Worker.determine_available_memory`` with a profiling run.
        """
        self._unsupported("measuring the peak of its memory")

    def allocate(self, num_bytes: int, tag: str) -> torch.Tensor:
        """Return a zeroed uint8 tensor of ``num_bytes`` on the device, accounted under ``tag``
        (``kv_cache``).
        """
        with self.pool(tag):
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def pool(self, tag: str) -> contextlib.AbstractContextManager[object]:
        """Return a context in which allocations belong to ``tag``, so that they can be put to sleep
        together.
        """
        return contextlib.nullcontext()

    # Moving data.

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised host tensor from which copies to the device are fastest."""
        return torch.empty(tuple(shape), dtype=dtype)

    def to_device(self, values: HostArray, dtype: torch.dtype) -> torch.Tensor:
        """Return a new device tensor with the host's ``values``; the host's may change
        afterwards.
        """
        return _on_host(values, dtype).to(device=self.device, dtype=dtype, copy=True)

    def write(self, target: torch.Tensor, values: HostArray) -> None:
        """Copy the host's ``values`` into ``target``, a device tensor of their shape; the host's
        may change afterwards.
        """
        target.copy_(_on_host(values, target.dtype))

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of a device tensor on the host; waits for them."""
        return tensor.cpu()

    def fetch(self, tensor: torch.Tensor) -> Fetch:
        """Begin to bring the values of a device tensor to the host; its ``wait()`` gives them. Work
        that the device gets in between goes on meanwhile, where the device can do that.
        """
        return Fetch(self.to_host(tensor))

    # Order of work.

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work given to the device is done."""

    @abstractmethod
    def stream(self) -> Any:
        """Return a new stream (a context; ``wait_stream``), or raise UnsupportedError."""

    def current_stream(self) -> Any:
        """Return the stream that work goes to now, or raise UnsupportedError."""
        self._unsupported("streams")

    @abstractmethod
    def event(self) -> Any:
        """Return a new event (``record``, ``synchronize``), or raise UnsupportedError."""

    # Graphs: what is launched once and replayed. The runner asks for them where ``graph_mode`` says
    # so, while it warms up; afterwards it replays only.

    default_graph_mode: ClassVar[str] = "none"
    """The mode (as the key ``graph_mode`` names it) where the user names none."""

    def compile(
        self, function: Callable[..., Any], shapes: Sequence[Mapping[str, int]]
    ) -> Callable[..., Any]:
        """Return ``function`` compiled for some shapes: each maps parameters of the function to the
        first dimensions of their tensors. Calls of other shapes run the function as it is.
        """
        self._unsupported("compiling")

    def graph_pool(self) -> Any:
        """Return memory for graphs to share: :meth:`capture` gets it again as ``pool``. Of the
        graphs of a pool only the one replayed last has its results.
        """
        self._unsupported("graphs")

    def capture(
        self,
        function: Callable[[], Any],
        key: Hashable,
        *,
        pool: Any = None,
        rehearsal: Callable[[], Any] | None = None,
    ) -> Graph:
        """Run ``function`` once, on the worker's thread, and return its work as a graph.

        ``function`` runs the model, or a segment of it, over static buffers: memory that is there
        at each replay, at the same address. It was run before, so that nothing is made for the
        first time. ``key`` (a :class:`~hardpoint_runtime.graphs.keys.BatchKey`, or ``(key, i)`` for
        segment i) comes again in :meth:`before_replay`. What the function allocates comes from
        ``pool``. ``rehearsal`` runs the same over another batch of the shape: a device that can
        see what is launched compares both. Called before any replay, larger shapes first.

        Raises GraphCaptureError for work that would not be the same again.
        """
        self._unsupported("graphs")

    def before_replay(  # noqa: B027 - a device without such needs does nothing
        self, key: Hashable, metadata: Mapping[str, AttentionMetadata]
    ) -> None:
        """Refresh what the graph of ``key`` reads besides its static buffers, from the step's
        metadata by layer. Called before each :meth:`replay`. Does nothing: static buffers suffice.
        """

    def replay(self, graph: Graph) -> Any:
        """Do the captured work again on the same memory, with what the static buffers hold; return
        ``graph.output``.
        """
        self._unsupported("graphs")

    def lower(self, runner: TorchModelRunner) -> StepProgram:
        """Return the runner's whole model as one program, which serves steps of any shape, over its
        weights and KV cache. Called by the warm-up of a runner whose plan is
        ``GraphPlan.of_program``; raises GraphCaptureError for a model that cannot be one.
        """
        self._unsupported("programs")

    def buckets(self, largest: int) -> tuple[int, ...]:
        """Return the token counts worth preparing up to ``largest``, rising; empty: any is fine."""
        return ()

    # Other ranks.

    def make_communicator(self, group: Group, meeting: Meeting) -> Communicator:
        """Return this rank's end of ``group``, for tensors on the device; waits until every member
        has come. Called by ``TorchWorker.join_group``, for groups of more than one.
        """
        self._unsupported("communication between ranks")

    # Watching.

    def profiler(self) -> Any:
        """Return what traces the work between its ``start()`` and ``stop()``, on host and device,
        and writes it with ``export_chrome_trace(path)``.
        """
        self._unsupported("profiling")

    def annotation(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Return a context that gives the work inside a name in a profile."""
        return torch.profiler.record_function(name)

    def _unsupported(self, what: str) -> NoReturn:
        raise UnsupportedError(what, f"device {self.device}")


class TorchDeviceOps(DeviceOps):
    """The port over ``torch.get_device_module(name)``.

    ``pins`` says whether host memory can be page-locked for this device. Plugins subclass it for
    what torch does not know about their device.
    """

    compiler: ClassVar[str | None] = None
    """A backend of ``torch.compile`` that knows the device; None: it is not compiled for."""

    def __init__(self, name: str, index: int | None = 0, *, pins: bool = False) -> None:
        self.device = torch.device(name) if index is None else torch.device(name, index)
        self.pins = pins
        self._module = torch.get_device_module(self.device)
        self._staged: StagedCopies | None = None

    def profiler(self) -> Any:
        """Return torch's own, over all that this build of it can trace."""
        return torch.profiler.profile(activities=torch.profiler.supported_activities())

    def set_device(self) -> None:
        """Make the device current, where its module has more than one."""
        if self.device.index is not None:
            self._call("set_device", self.device.index)

    def seed(self, seed: int) -> None:
        """Seed the generators of all devices of this kind."""
        self._call("manual_seed_all", seed)

    def memory_info(self) -> MemoryInfo:
        """Ask the device module's ``mem_get_info``."""
        free, total = self._call("mem_get_info", self.device)
        return MemoryInfo(free=free, total=total)

    def memory_allocated(self) -> int:
        """Ask the device module's ``memory_allocated``."""
        return int(self._call("memory_allocated", self.device))

    def peak_memory(self, run: Callable[[], object]) -> int:
        """Ask the device module's ``max_memory_allocated``, started anew."""
        self._call("reset_peak_memory_stats", self.device)
        run()
        self.synchronize()
        return int(self._call("max_memory_allocated", self.device))

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Page-locked where :attr:`pins` says so."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self.pins)

    @property
    def staged(self) -> StagedCopies | None:
        """How values travel through page-locked memory; None without :attr:`pins`."""
        if self._staged is None and self.pins:
            self._staged = StagedCopies(self)
        return self._staged

    def to_device(self, values: HostArray, dtype: torch.dtype) -> torch.Tensor:
        """Through page-locked memory where there is any: the host does not wait."""
        if self.staged is None:
            return super().to_device(values, dtype)
        return self.staged.to_device(_on_host(values, dtype), dtype)

    def write(self, target: torch.Tensor, values: HostArray) -> None:
        """Through page-locked memory where there is any: the host does not wait."""
        if self.staged is None:
            super().write(target, values)
        else:
            self.staged.write(target, _on_host(values, target.dtype))

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Through page-locked memory where there is any; waits for no more than the values."""
        return super().to_host(tensor) if self.staged is None else self.fetch(tensor).wait()

    def fetch(self, tensor: torch.Tensor) -> Fetch:
        """Copy to page-locked memory, where there is any, on a stream of its own."""
        return super().fetch(tensor) if self.staged is None else self.staged.fetch(tensor)

    def synchronize(self) -> None:
        """Wait for the device."""
        self._call("synchronize", self.device)

    def stream(self) -> Any:
        """Return the device module's ``Stream``."""
        return self._call("Stream")

    def current_stream(self) -> Any:
        """Ask the device module's ``current_stream``."""
        return self._call("current_stream", self.device)

    def event(self) -> Any:
        """Return the device module's ``Event``."""
        return self._call("Event")

    def make_communicator(self, group: Group, meeting: Meeting) -> Communicator:
        """Go through host memory. Plugins whose device has a library of its own override it, with
        :class:`hardpoint_runtime.parallel.process_group.ProcessGroupCommunicator`, say.
        """
        from hardpoint_runtime.parallel.host import StagedCommunicator, host_communicator

        return StagedCommunicator(host_communicator(group, meeting), self)

    def compile(
        self, function: Callable[..., Any], shapes: Sequence[Mapping[str, int]]
    ) -> Callable[..., Any]:
        """Compile by ``torch.compile`` with :attr:`compiler`, each shape at its first call."""
        if self.compiler is None:
            return super().compile(function, shapes)
        from hardpoint_runtime.graphs.compiled import CompiledShapes

        compiled = torch.compile(function, backend=self.compiler, dynamic=False, fullgraph=True)
        return CompiledShapes(function, compiled, shapes)

    def graph_pool(self) -> GraphPool:
        """Return memory for recorded graphs."""
        from hardpoint_runtime.graphs.recorded import GraphPool

        return GraphPool(lambda num_bytes: self.allocate(num_bytes, "graphs"))

    def capture(
        self,
        function: Callable[[], Any],
        key: Hashable,
        *,
        pool: Any = None,
        rehearsal: Callable[[], Any] | None = None,
    ) -> Graph:
        """Record a list of operations, which works on every torch device; see
        :mod:`hardpoint_runtime.graphs.recorded`. Devices with graphs of their own override this and
        :meth:`replay`.
        """
        from hardpoint_runtime.graphs.recorded import record_graph

        return record_graph(function, key, pool or self.graph_pool(), rehearsal)

    def replay(self, graph: Any) -> Any:
        """Run the list of operations."""
        return graph.replay()

    def _call(self, name: str, *args: object) -> Any:
        function = getattr(self._module, name, None)
        if function is None:
            self._unsupported(
                f"{name}: torch's module {self._module.__name__} has no such function"
            )
        return function(*args)


class HostDeviceOps(TorchDeviceOps):
    """The port for host memory. Work is done when the call returns, and nothing is ever copied to
    another side.

    Plugins add their figures of memory; what the host may use is a matter of limits and cgroups.
    ``collectives`` is the kind of communication among ranks.
    """

    def __init__(self, collectives: str = "auto") -> None:
        super().__init__("cpu", None)
        self.collectives = collectives

    def make_communicator(self, group: Group, meeting: Meeting) -> Communicator:
        """As :attr:`collectives` says: ``auto``, ``shared_memory`` or ``gloo``."""
        from hardpoint_runtime.parallel.host import host_communicator

        return host_communicator(group, meeting, self.collectives)

    def seed(self, seed: int) -> None:
        """Seed torch's default generator, which is this device's."""
        torch.default_generator.manual_seed(seed)

    def allocate(self, num_bytes: int, tag: str) -> torch.Tensor:
        """Return zeroed memory that costs nothing until it is touched.

        numpy asks the allocator for zero pages; torch would write every byte at once.
        """
        with self.pool(tag):
            return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor

    def synchronize(self) -> None:
        """Do nothing: no work is ever outstanding."""


def _on_host(values: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return ``values`` as a host tensor; numbers of a sequence become ``dtype``."""
    if isinstance(values, torch.Tensor):
        return values
    if isinstance(values, np.ndarray):
        return torch.from_numpy(values)
    return torch.tensor(values, dtype=dtype)
