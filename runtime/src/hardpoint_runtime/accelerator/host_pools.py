"""How host tensors come into pools that sleep, where host memory stands for a device.

torch has no memory pools for the host. So within ``use(tag)`` every tensor that is made empty or of
zeros is given memory of the pool; what other operations return is the host allocator's. Models are
made that way: parameters and buffers first, then filled in place.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hardpoint_runtime.accelerator.host_memory import HostVirtualMemory
from hardpoint_runtime.accelerator.pools import AddressKeepingPools

_ATEN = torch.ops.aten
MADE = {
    _ATEN.empty.memory_format, _ATEN.empty_strided.default, _ATEN.empty_like.default,
    _ATEN.new_empty.default, _ATEN.new_empty_strided.default, _ATEN.zeros.default,
    _ATEN.new_zeros.default, _ATEN.zeros_like.default,
}  # fmt: skip


class HostPools(AddressKeepingPools):
    """Pools of host memory, a piece for each tensor. New memory is zero and costs nothing until it
    is touched.
    """

    memory: HostVirtualMemory

    @contextlib.contextmanager
    def use(self, tag: str) -> Iterator[None]:
        """Make tensors of memory of the pool of ``tag``, on this thread."""
        with _Placing(self, tag):
            yield

    def tensor(
        self, tag: str, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a new tensor of zeros; its memory is given back when nobody uses it any more."""
        last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        num_bytes = (last + 1) * dtype.itemsize
        address = self.allocate(tag, num_bytes)
        memory = (ctypes.c_char * num_bytes).from_address(address)
        weakref.finalize(memory, self.free, address).atexit = False
        return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride)


class _Placing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives what is made on the host memory of a pool."""

    def __init__(self, pools: HostPools, tag: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pools = pools
        self._tag = tag

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler, for seconds, to skip it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation; give what it makes another place."""
        kwargs = kwargs or {}
        if func not in MADE or _made_elsewhere(args, kwargs):
            return func(*args, **kwargs)
        with torch.device("meta"):
            like = func(*args, **{**kwargs, "device": torch.device("meta")})
        if not math.prod(like.shape):
            return func(*args, **kwargs)
        return self._pools.tensor(self._tag, like.shape, like.stride(), like.dtype)


def _made_elsewhere(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether what an operation makes is on no host memory: it is where that is asked for, else
    where the tensor is that it is to be like.
    """
    asked = kwargs.get("device")
    if asked is None and args and isinstance(args[0], torch.Tensor):
        asked = args[0].device
    return asked is not None and torch.device(asked).type != "cpu"
