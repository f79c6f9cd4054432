"""A torch device that enforces the order of work: relying on luck is an error.

Work on the device ``ordered`` is computed at once, on host tensors inside; what is simulated is who
may know that it is done. Every stream counts its work and knows, from events, up to where the
others' work comes before its own (a vector clock); the host knows what it waited for. Each piece of
memory remembers its last write and the reads since. Work that reads or overwrites memory without
being ordered after whom it depends on raises :class:`OrderError`.

Copies from the device to page-locked host memory that do not block arrive only when the host waits
for them: until then the memory holds rubbish, and touching it is an error. Changing page-locked
memory that a copy may still read is one, too.

Process-global, like any torch device: :func:`install` it in a process of its own.
"""

from __future__ import annotations

import ctypes
import functools
import types
import weakref

import torch
from hardpoint_runtime.accelerator.placed_pools import PlacedPools
from ordered_graph import Graph
from ordered_memory import MEMORY, RANGES, OrderedVirtualMemory
from torch.utils._python_dispatch import return_and_correct_aliasing

NAME = "ordered"
RUBBISH = 0x5A
"""What every byte of page-locked memory holds while a copy to it is on its way."""


class OrderError(RuntimeError):
    """Work, or the host, depends on other work and is not ordered after it."""


# Order.


class Stream:
    """Work in order. ``seen`` maps other streams to how much of theirs comes before what follows
    here.
    """

    def __init__(self, name=None):
        self.name = name or f"stream {len(DEVICE.streams)}"
        self.done = 0
        self.seen = {}
        self._outer = []
        DEVICE.streams.append(self)

    def __repr__(self):
        return f"<{self.name}>"

    def __enter__(self):
        self._outer.append(DEVICE.current)
        DEVICE.current = self
        return self

    def __exit__(self, *exception):
        DEVICE.current = self._outer.pop()

    def next(self):
        self.done += 1
        return self.done

    def follows(self, point):
        """Whether what is given to this stream now comes after ``point``, (stream, number)."""
        stream, number = point
        return stream is self or self.seen.get(stream, 0) >= number or DEVICE.knows(point)

    def front(self):
        """What comes before the next work here."""
        return {**self.seen, self: self.done}

    def wait_stream(self, other):
        DEVICE.note(self, f"wait for {other.name}")
        merge(self.seen, other.front())

    def wait_event(self, event):
        DEVICE.note(self, "wait for event")
        merge(self.seen, event.front)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        DEVICE.host_waits(self.front())


class Event:
    """A point in a stream's work."""

    def __init__(self, *args, **kwargs):
        self.front = {}
        self._asked = False

    def record(self, stream=None):
        stream = stream or DEVICE.current
        DEVICE.note(stream, "record event")
        self.front = stream.front()
        self._asked = False

    def wait(self, stream=None):
        (stream or DEVICE.current).wait_event(self)

    def synchronize(self):
        DEVICE.host_waits(self.front)

    def query(self):
        """Whether it is reached: not at the first question, so that nobody counts on it."""
        if all(DEVICE.knows(point) for point in self.front.items()):
            return True
        if self._asked:
            DEVICE.host_waits(self.front)
            return True
        self._asked = True
        return False


class Device:
    """The state of the one device: streams, what the host knows, copies that have not arrived."""

    def __init__(self):
        self.streams = []
        self.host = {}
        self.copies = []
        self.log = []
        self.capture = None

    def begin(self):
        """Make the device as new."""
        self.__init__()
        for each in RANGES.values():
            each.points.clear()
        self.current = self.default = Stream("default stream")

    def knows(self, point):
        """Whether the host knows that work is done; all is of streams before the device was new."""
        stream, number = point
        return self.host.get(stream, 0) >= number or stream not in self.streams

    def note(self, stream, what):
        self.log.append((stream.name, what))

    def host_waits(self, front):
        """Let the host wait for ``front``; copies up to there arrive."""
        if self.capture is not None and self.capture.concerns_thread():
            self.capture.refuse("waiting for the device")
        self.log.append(("host", "wait"))
        merge(self.host, front)
        arrived = [copy for copy in self.copies if self.knows(copy.point)]
        self.copies = [copy for copy in self.copies if not self.knows(copy.point)]
        for copy in arrived:
            copy.arrive()

    def synchronize(self, device=None):
        front = {}
        for stream in self.streams:
            merge(front, stream.front())
        self.host_waits(front)


def merge(into, front):
    for stream, number in front.items():
        into[stream] = max(into.get(stream, 0), number)


DEVICE = Device()
Graph.device = DEVICE


class History:
    """What was done with one piece of memory. ``home`` is the stream that it was allocated on, to
    whose later work it goes when nobody holds it any more.
    """

    __slots__ = ("__weakref__", "home", "num_bytes", "range", "reads", "what", "written")

    def __init__(self, lies_in=None):
        self.home = DEVICE.current
        self.written = None
        self.what = ""
        self.reads = {}
        self.num_bytes = 0
        self.range = lies_in
        if lies_in is not None:
            lies_in.histories.add(self)

    def __del__(self):
        if self.range is None:
            MEMORY.give_back(self.num_bytes)
        else:
            points = [*self.reads.items(), *([self.written] if self.written else ())]
            merge(self.range.points, {s: n for s, n in points if s in DEVICE.streams})

    def grow(self, num_bytes):
        """The memory is of ``num_bytes`` now."""
        if self.range is None:
            MEMORY.take(num_bytes - self.num_bytes)
        self.num_bytes = num_bytes

    def require_mapped(self, what):
        if self.range is not None and not self.range.mapped:
            raise OrderError(f"{what} touches memory that sleeps, at {self.range.address:#x}")

    def require_done(self, what):
        """Raise unless the host knows that all work on the memory is done."""
        require_known([*self.reads.items(), *([self.written] if self.written else ())], what)

    def read(self, stream, number, what):
        self.require_mapped(what)
        written = self.written
        if written is not None and written[0] is not stream and not stream.follows(written):
            raise OrderError(
                f"{what} on {stream.name} reads what {self.what} on {written[0].name} writes, and "
                "does not wait for it"
            )
        self.reads[stream] = number

    def write(self, stream, number, what):
        self.read(stream, number, what)
        for reader, last in self.reads.items():
            if reader is not stream and not stream.follows((reader, last)):
                raise OrderError(
                    f"{what} on {stream.name} overwrites what {reader.name} still reads, and does "
                    "not wait for it"
                )
        self.written, self.what = (stream, number), what
        self.reads.clear()

    def host_reads(self, what):
        if self.written is not None and not DEVICE.knows(self.written):
            raise OrderError(
                f"the host reads ({what}) what {self.what} on {self.written[0].name} brings, and "
                "did not wait for the event that guards it"
            )

    def host_writes(self, what):
        self.host_reads(what)
        for point in self.reads.items():
            if not DEVICE.knows(point):
                raise OrderError(
                    f"the host changes ({what}) page-locked memory that a copy on {point[0].name} "
                    "may still read"
                )


def require_known(points, what):
    for point in points:
        if not DEVICE.knows(point):
            raise OrderError(f"{what} while work on {point[0].name} may still use it")


OrderedVirtualMemory.require_known = staticmethod(require_known)


# Copies.


class Arrival:
    """A copy to page-locked memory that is on its way. What it reads must be held until it is done,
    or until the stream that the memory goes back to comes after it.
    """

    def __init__(self, source, target, point):
        self.point = point
        self.values = source.inner.detach().clone()
        self.target = target.detach()
        self.lost = False
        home = source.history.home
        self.source = weakref.ref(source.history, lambda ref: self.given_back(home))
        target.history.write(*point, "a copy to the host")
        bytes_of(self.target).fill_(RUBBISH)

    def given_back(self, home):
        self.lost = not home.follows(self.point)

    def arrive(self):
        if self.lost:
            raise OrderError(
                f"the memory that a copy on {self.point[0].name} reads was given back before the "
                "copy was done"
            )
        plain(self.target).copy_(self.values)


class Departure:
    """A copy from page-locked memory that may read it until it is done."""

    def __init__(self, source, point):
        self.point = point
        self.source = source.detach()
        self.values = plain(source).clone()
        source.history.read(*point, "a copy from the host")

    def arrive(self):
        if not torch.equal(bytes_of(self.source), bytes_of(self.values)):
            raise OrderError(
                f"the host changed page-locked memory before the copy on {self.point[0].name} that "
                "reads it was done"
            )


def plain(tensor):
    return tensor.as_subclass(torch.Tensor) if type(tensor) is PinnedTensor else tensor


def bytes_of(tensor):
    return plain(tensor).contiguous().view(-1).view(torch.uint8)


# Memory.


class PinnedTensor(torch.Tensor):
    """Page-locked host memory: what touches its values asks whether it may."""

    @staticmethod
    def new(shape, dtype):
        memory = torch.empty(tuple(shape), dtype=dtype)
        bytes_of(memory).fill_(RUBBISH)
        tensor = torch.Tensor._make_subclass(PinnedTensor, memory)
        tensor.history = History()
        return tensor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.__name__
        changes = name in ("__setitem__", "numpy", "__array__")
        changes |= name.endswith("_") and not name.startswith("_")
        leaves = (*args, *kwargs.values())
        pinned = [each for each in leaves if type(each) is PinnedTensor]
        with torch._C.DisableTorchFunctionSubclass():
            if name == "__get__" or name in UNTOUCHED:
                return func(*args, **kwargs)
            if any(isinstance(each, OrderedTensor | torch.device) for each in leaves):
                return func(*args, **kwargs)  # a copy: its dispatch looks at the order
            if changes and type(args[0]) is PinnedTensor:
                args[0].history.host_writes(name)
            result = func(*args, **kwargs)
            if is_view_of(result, pinned[0]):
                view = result.as_subclass(PinnedTensor)
                view.history = pinned[0].history
                return view
        for each in pinned:
            each.history.host_reads(name)
        return result


UNTOUCHED = {
    "as_subclass", "data_ptr", "dim", "element_size", "is_contiguous", "is_pinned", "numel", "size",
    "storage_offset", "stride", "untyped_storage", "__len__",
}  # fmt: skip


def is_view_of(result, tensor):
    return (
        isinstance(result, torch.Tensor)
        and not isinstance(result, OrderedTensor)
        and result.untyped_storage().data_ptr() == plain(tensor).untyped_storage().data_ptr()
        and result.numel() > 0
    )


class OrderedTensor(torch.Tensor):
    """A tensor on the device; ``inner`` is the host tensor that stands for its memory."""

    @staticmethod
    def __new__(cls, inner, history=None, lies_in=None):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE.device,
        )

    def __init__(self, inner, history=None, lies_in=None):
        self.inner = inner
        if history is None:
            history = History(lies_in)
            history.grow(inner.untyped_storage().nbytes())
        self.history = history

    def __repr__(self):
        return f"OrderedTensor({tuple(self.shape)}, {self.dtype})"

    def data_ptr(self):
        return self.inner.data_ptr()

    def tolist(self):
        return self.cpu().tolist()

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, other):
        torch.Tensor.data.__set__(self, other)
        self.inner, self.history = other.inner, other.history

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kind = KINDS.get(func) or kind_of(func)
        if kind.composite:
            # Inference mode brings composite operations here whole; a device has kernels for
            # their parts only.
            parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if kind.name == "aten::copy_":
            return copy(*args, **kwargs)
        if kind.name == "aten::_to_copy":
            device = kwargs.get("device")
            if device is not None and device.type == "cpu":
                return to_host(*args, **kwargs)
        if kind.name == "aten::_local_scalar_dense":
            return blocking(args[0]).item()
        return compute(func, kind, args, kwargs)


class Kind:
    """What the schema of an operation says."""

    def __init__(self, func):
        schema = func._schema
        self.name = schema.name
        self.composite = torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        )
        self.is_view = func.is_view or self.name == "aten::_unsafe_view"
        self.aliases = any(each.alias_info is not None for each in schema.returns)
        writes = [
            (index, each.name)
            for index, each in enumerate(schema.arguments)
            if each.alias_info is not None and each.alias_info.is_write
        ]
        # An operation in place gives the argument that it writes.
        in_place = len(schema.returns) == len(writes) == 1 and self.aliases
        self.gives = (
            writes[0][0] if in_place and not schema.arguments[writes[0][0]].kwarg_only else None
        )
        self.written = {index for index, _ in writes}
        self.written_names = {name for _, name in writes}


KINDS = {}


def kind_of(func):
    return KINDS.setdefault(func, Kind(func))


def compute(func, kind, args, kwargs):
    """Do an operation of the device on its current stream."""
    stream = DEVICE.current
    number = stream.next()
    writes = []
    for index, arg in enumerate(args):
        for tensor in tensors_in(arg):
            if index in kind.written:
                writes.append(tensor)
            elif not kind.is_view:
                tensor.history.read(stream, number, kind.name)
    for name, arg in kwargs.items():
        for tensor in tensors_in(arg):
            if name in kind.written_names:
                writes.append(tensor)
            else:
                tensor.history.read(stream, number, kind.name)
    for tensor in writes:
        tensor.history.write(stream, number, kind.name)
    capture = DEVICE.capture
    if capture is not None:
        capture.will_write(writes)
    given = [inner(arg) for arg in args], {name: inner(arg) for name, arg in kwargs.items()}
    result = func(*given[0], **given[1])
    for tensor in writes:
        if tensor.shape != tensor.inner.shape:  # what was empty is resized, as on a real device
            tensor.data = OrderedTensor(tensor.inner, tensor.history)
            tensor.history.grow(tensor.inner.untyped_storage().nbytes())
    history = args[0].history if kind.is_view else None
    if kind.aliases and writes:
        history = writes[0].history  # what it gives is what it was given
    # A view is an inference tensor if its base is one, whatever mode is on.
    as_base = kind.is_view and not args[0].is_inference()
    if as_base and torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            wrapped = outer(result, history)
    else:
        wrapped = outer(result, history)
    if not kind.is_view:
        for tensor in tensors_in(wrapped):
            tensor.history.written, tensor.history.what = (stream, number), kind.name
        if capture is not None:
            made = () if kind.aliases else tensors_in(wrapped)
            reads = [each for arg in (*args, *kwargs.values()) for each in tensors_in(arg)]
            capture.note(again(func, given, made), reads, writes, made)
    if kind.gives is not None:
        return args[kind.gives]
    if kind.aliases:
        return return_and_correct_aliasing(func, args, kwargs, wrapped)
    return wrapped


def again(func, given, made):
    """What does an operation once more, into the memory that it made the first time."""

    def replayed():
        found = func(*given[0], **given[1])
        found = found if isinstance(found, list | tuple) else (found,)
        for target, values in zip(made, found, strict=False):
            target.inner.copy_(values)

    return replayed


def tensors_in(arg):
    """The device tensors of an argument. Others than numbers may not be among them."""
    if isinstance(arg, OrderedTensor):
        return (arg,)
    if isinstance(arg, torch.Tensor):
        if arg.dim():
            raise RuntimeError(
                f"expected all tensors to be on {DEVICE.device}, found one on {arg.device}"
            )
        return ()
    if isinstance(arg, list | tuple):
        return [tensor for each in arg for tensor in tensors_in(each)]
    return ()


def inner(arg):
    if isinstance(arg, OrderedTensor):
        return arg.inner
    if isinstance(arg, list | tuple):
        return type(arg)(map(inner, arg))
    if isinstance(arg, torch.device) and arg.type == NAME:
        return torch.device("cpu")
    return arg


def outer(result, history):
    if type(result) is torch.Tensor:
        return OrderedTensor(result, history)
    if isinstance(result, list | tuple):
        return type(result)(outer(each, history) for each in result)
    return result


def blocking(tensor):
    """Let the host wait until ``tensor`` is computed, as the current stream sees it; return the
    host tensor inside.
    """
    stream = DEVICE.current
    tensor.history.read(stream, stream.next(), "a read by the host")
    DEVICE.host_waits(stream.front())
    return tensor.inner


def copy(target, source, non_blocking=False):
    """``copy_`` from, to or within the device."""
    stream = DEVICE.current
    capture = DEVICE.capture
    if capture is not None and not (type(target) is type(source) is OrderedTensor):
        capture.refuse("a copy to or from the host")
    if not isinstance(target, OrderedTensor):
        if not non_blocking:
            values = blocking(source)
            if type(target) is PinnedTensor:
                target.history.host_writes("copy_")
            plain(target).copy_(values)
        elif type(target) is PinnedTensor:
            point = (stream, stream.next())
            source.history.read(*point, "a copy to the host")
            DEVICE.note(stream, "copy to the host")
            DEVICE.copies.append(Arrival(source, target, point))
        else:
            raise OrderError(
                "a copy to host memory that is not page-locked does not block: nothing guards it"
            )
        return target
    point = (stream, stream.next())
    target.history.write(*point, "copy_")
    if isinstance(source, OrderedTensor):
        source.history.read(*point, "copy_")
        if capture is not None:
            capture.will_write((target,))
            replayed = functools.partial(target.inner.copy_, source.inner)
            capture.note(replayed, (source,), (target,), ())
        target.inner.copy_(source.inner)
        return target
    if type(source) is PinnedTensor:
        source.history.host_reads("copy_")
        DEVICE.note(stream, "copy from the host")
        departure = Departure(source, point)
        if non_blocking:
            DEVICE.copies.append(departure)
        else:
            DEVICE.host_waits(stream.front())
    target.inner.copy_(plain(source))
    return target


def to_host(source, *, dtype=None, non_blocking=False, **options):
    """``_to_copy`` to the host."""
    dtype = dtype or source.dtype
    if not non_blocking:
        return blocking(source).to(dtype=dtype, copy=True)
    target = PinnedTensor.new(source.shape, source.dtype)
    copy(target, source, non_blocking=True)
    return target if dtype == source.dtype else target.to(dtype)


class OrderedPools(PlacedPools):
    """Pools of the device: a tensor of theirs is one that stands for memory of a range."""

    def storage(self, address, num_bytes):
        return (ctypes.c_char * num_bytes).from_address(address)

    def start_of(self, tensor):
        return tensor.inner.untyped_storage().data_ptr()

    def over(self, storage, shape, stride, dtype):
        address = ctypes.addressof(storage)
        lies_in = next(each for each in RANGES.values() if each.has(address))
        host = torch.frombuffer(storage, dtype=dtype).as_strided(shape, stride)
        return OrderedTensor(host, None, lies_in)


# The device, as torch knows it.


def empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    """``aten::empty.memory_format``."""
    return made(torch.empty, size, dtype)


def empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    """``aten::empty_strided``."""
    return made(functools.partial(torch.empty_strided, stride=stride), size, dtype)


def made(make, size, dtype):
    """A tensor of the allocator."""
    try:
        host = make(size, dtype=dtype, device="cpu")
    except RuntimeError as error:
        raise torch.OutOfMemoryError(str(error)) from error
    return OrderedTensor(host)


def copy_from(source, destination, non_blocking=False):
    """``aten::_copy_from``: how ``torch.tensor(values, device=...)`` brings its values over."""
    return copy(destination, source, non_blocking)


class Guard(torch._C._acc.DeviceGuard):
    """Tells torch that the device exists; it has one index only."""

    def type_(self):
        return torch._C._autograd.DeviceType.PrivateUse1


def device_module():
    """Return the module behind ``torch.ordered``."""
    module = types.ModuleType(f"torch.{NAME}")
    answers = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "set_device": None, "manual_seed_all": None, "_is_in_bad_fork": False,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(module, name, lambda *args, answer=answer, **kwargs: answer)
    for name in (
        "empty_cache", "max_memory_allocated", "max_memory_reserved", "mem_get_info",
        "memory_allocated", "memory_reserved", "reset_peak_memory_stats",
    ):  # fmt: skip
        setattr(module, name, getattr(MEMORY, name))
    module.Stream, module.Event = Stream, Event
    module.Graph = Graph
    module.synchronize = DEVICE.synchronize
    module.current_stream = lambda device=None: DEVICE.current
    return module


LIBRARIES = []


def install():
    """Make ``torch.device("ordered")`` usable in this process, once."""
    if LIBRARIES:
        return
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device_module())
    torch._C._acc.register_python_privateuseone_device_guard(Guard())
    library = torch.library.Library("aten", "IMPL")
    LIBRARIES.append(library)  # the kernels go when it does
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    Device.device = torch.device(NAME, 0)
    DEVICE.begin()
