"""How tensors come into pools that sleep: what is made within ``use(tag)`` is placed in a pool.

Every tensor that is made empty or of zeros there is given memory of the pool; what other operations
return is torch's own. Models are made that way: parameters and buffers first, then filled in place;
what was put in their place meanwhile is moved in afterwards (:meth:`PlacedPools.take_in`). Small
tensors share pages.

Four ways were judged (torch 2.13):

* *Expandable segments* keep addresses and map pages on demand, but only torch decides what is
  mapped: memory under a live tensor cannot be taken away.
* *A pluggable allocator alone* replaces torch's for the whole process, before its first use: every
  temporary would become a range of addresses of its own, uncached and slow, and a second engine in
  the process could not choose.
* *torch's memory pools over a pluggable allocator* call its functions while torch's allocator holds
  its lock. In Python, these take the interpreter's lock; a thread that has that one and lets a
  tensor of the device go, as a collection of garbage does on any thread, asks for the allocator's.
  Both wait for ever.
* *Pools of our own* call nobody: memory is taken from the driver first, with no lock of torch's
  held, and a storage is made over its address. It is given back when the storage is gone. torch's
  allocator may be set in any way, and so may its other users be. This is what is used.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import define
from torch.utils._python_dispatch import TorchDispatchMode

from hardpoint_runtime.accelerator.pools import AddressKeepingPools, HostBuffer
from hardpoint_runtime.accelerator.virtual_memory import VirtualMemory

_logger = logging.getLogger("hardpoint.worker")

_ATEN = torch.ops.aten
ZEROS = {
    _ATEN.zeros.default, _ATEN.new_zeros.default, _ATEN.zeros_like.default,
}  # fmt: skip
MADE = ZEROS | {
    _ATEN.empty.memory_format, _ATEN.empty_strided.default, _ATEN.empty_like.default,
    _ATEN.new_empty.default, _ATEN.new_empty_strided.default,
}  # fmt: skip
_all: weakref.WeakSet[PlacedPools] = weakref.WeakSet()
"""Those of every engine in this process, as torch's own figures are of all."""
ALIGNMENT = 512
"""Tensors on a page begin at multiples of this many bytes."""
WIDEST = 16
"""The bytes of the widest number."""


@define(eq=False)
class Page:
    """A piece that small tensors share: the bytes given away, and how many tensors lie there."""

    address: int
    used: int = 0
    tensors: int = 0

    def take(self, num_bytes: int) -> int:
        """Return the address of one tensor more."""
        address = self.address + self.used
        self.used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self.tensors += 1
        return address


class PlacedPools(AddressKeepingPools):
    """Pools of ``device``, over its virtual memory. ``most`` is the most that all pools of the
    device in this process held when one of these grew, until it is set anew.
    """

    most = 0

    def __init__(
        self,
        memory: VirtualMemory,
        device: torch.device,
        host_buffer: HostBuffer,
        *,
        synchronize: Callable[[], None],
        give_back: Callable[[], None],
    ) -> None:
        super().__init__(memory, host_buffer, synchronize, give_back)
        self.device = device
        self._open: dict[str, Page] = {}
        """The page of each tag that the next small tensor goes to."""
        self._pages: dict[int, Page] = {}
        _all.add(self)

    def allocate(self, tag: str, num_bytes: int) -> int:
        """Return the address of new memory. Raises torch.OutOfMemoryError."""
        address = super().allocate(tag, num_bytes)
        self.most = max(self.most, held_by_all(self.device))
        return address

    @contextlib.contextmanager
    def use(self, tag: str) -> Iterator[None]:
        """Place tensors in the pool of ``tag``, on this thread."""
        with _Placing(self, tag):
            yield

    def tensor(
        self, tag: str, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a new tensor, with undefined contents. Its memory is given back when nobody uses
        it any more. Raises torch.OutOfMemoryError.
        """
        last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        num_bytes = (last + 1) * dtype.itemsize
        address, piece = self._place(tag, num_bytes)
        storage = self.storage(address, num_bytes)
        weakref.finalize(storage, self._leave, tag, piece).atexit = False
        return self.over(storage, shape, stride, dtype)

    def take_in(self, tag: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Move tensors of the device that lie elsewhere into the pool of ``tag``: each piece of
        memory once, so that views of one stay so. The tensors are the same objects. Return those
        without memory of their own (sparse ones, wrappers).
        """
        left: dict[str, torch.Tensor] = {}
        shared: dict[int, list[torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if not self.has(tensor.device) or not tensor.numel():
                continue
            if tensor.layout != torch.strided or not tensor.data_ptr():
                left[name] = tensor
            elif not self._inside(tag, tensor.data_ptr()):
                shared.setdefault(self.start_of(tensor), []).append(tensor)
        for group in shared.values():
            self._move(tag, group)
        return left

    def start_of(self, tensor: torch.Tensor) -> int:
        """Return where the memory begins in which a tensor lies."""
        return tensor.untyped_storage().data_ptr()

    def storage(self, address: int, num_bytes: int) -> Any:
        """Return a storage over memory that is the device's at ``address``."""
        make = torch._C._construct_storage_from_data_pointer  # noqa: SLF001 - as torch's own graphs do
        return make(address, self.device, num_bytes)

    def over(
        self, storage: Any, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a tensor over the whole of a storage."""
        empty = torch.empty(0, dtype=dtype, device=self.device)
        return empty.set_(storage, 0, tuple(shape), tuple(stride))

    def has(self, device: torch.device) -> bool:
        """Whether that is the pools' device; one without a number is the current one."""
        return device.type == self.device.type and device.index in (None, self.device.index)

    def _inside(self, tag: str, address: int) -> bool:
        pieces = self._of([tag])
        return any(each.address <= address < each.address + each.num_bytes for each in pieces)

    def _move(self, tag: str, tensors: Sequence[torch.Tensor]) -> None:
        """Move tensors of one piece of memory."""
        size = max(map(_end_of, tensors))
        with torch.inference_mode(tensors[0].is_inference()), torch.no_grad():
            memory = self.tensor(tag, (-(-size // WIDEST) * WIDEST,), (1,), torch.uint8)
            for each in tensors:
                place = memory.view(each.dtype)
                place = place.as_strided(each.shape, each.stride(), each.storage_offset())
                place.copy_(each)
                each.data = place

    def _place(self, tag: str, num_bytes: int) -> tuple[int, int]:
        """Return (the address of memory for a tensor, that of the piece which it is in)."""
        size = self.memory.granularity
        if 2 * num_bytes > size:
            address = self.allocate(tag, num_bytes)
            return address, address
        with self._lock:
            page = self._open.get(tag)
            fits = page is not None and page.used + num_bytes <= size
            if page is not None and fits and self._pieces[page.address].mapped:
                return page.take(num_bytes), page.address
        page = Page(address=self.allocate(tag, size))
        with self._lock:
            self._open[tag] = self._pages[page.address] = page
            return page.take(num_bytes), page.address

    def _leave(self, tag: str, piece: int) -> None:
        """Give a piece back in which the last tensor is gone. Called on any thread; where the
        interpreter ends, the driver takes everything.
        """
        if sys.is_finalizing():
            return
        with self._lock:
            page = self._pages.get(piece)
            if page is not None:
                page.tensors -= 1
                if page.tensors:
                    return
                del self._pages[piece]
                if self._open.get(tag) is page:
                    del self._open[tag]
        try:
            self.free(piece)
        except Exception:
            _logger.exception("memory of %s at %#x cannot be given back", tag, piece)


def _end_of(tensor: torch.Tensor) -> int:
    """Return how many bytes of its storage reach to the end of a tensor."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * step for size, step in steps)
    return (last + 1) * tensor.element_size()


def held_by_all(device: torch.device) -> int:
    """Return the bytes that placed pools of this process hold of ``device`` now."""
    return sum(pools.held() for pools in tuple(_all) if pools.device == device)


class _Placing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives what is made on the device memory of a pool."""

    def __init__(self, pools: PlacedPools, tag: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pools = pools
        self._tag = tag

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler, for seconds, to skip it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation; give what it makes another place."""
        kwargs, pools = kwargs or {}, self._pools
        if func not in MADE or not pools.has(_place_of(args, kwargs)):
            return func(*args, **kwargs)
        with torch.device("meta"):
            like = func(*args, **{**kwargs, "device": torch.device("meta")})
        if not math.prod(like.shape):
            return func(*args, **kwargs)
        made = pools.tensor(self._tag, like.shape, like.stride(), like.dtype)
        if func in ZEROS and not pools.memory.new_is_zero:
            made.zero_()
        return made


def _place_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    """Return where an operation makes its tensor: where that is asked for, else where the tensor is
    that it is to be like, else on the host.
    """
    asked = kwargs.get("device")
    if asked is None and args and isinstance(args[0], torch.Tensor):
        asked = args[0].device
    return torch.device("cpu" if asked is None else asked)
