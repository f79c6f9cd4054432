"""Virtual memory of a device through its driver's C functions, for drivers that share their form:
addresses are reserved, memory is created, mapped there and given access. Called through ctypes.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from hardpoint_runtime.accelerator.virtual_memory import VirtualMemory

PINNED, ON_DEVICE, READ_WRITE = 1, 1, 3
"""The kind of memory, where it is, and what the device may do with it."""
OUT_OF_MEMORY = 2
"""What the functions return where the device has no memory left; 0 is success."""


class Location(ctypes.Structure):
    """Which device."""

    _fields_ = (("kind", ctypes.c_int), ("index", ctypes.c_int))


class Properties(ctypes.Structure):
    """What memory is to be created."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("shared_as", ctypes.c_int),
        ("location", Location),
        ("elsewhere", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """Who may use a range."""

    _fields_ = (("location", Location), ("may", ctypes.c_int))


SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "granularity": (ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(Properties), ctypes.c_int),
    "reserve": (
        ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint64,
        ctypes.c_uint64,
    ),
    "create": (
        ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t, ctypes.POINTER(Properties),
        ctypes.c_uint64,
    ),
    "map": (
        ctypes.c_uint64, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64,
    ),
    "access": (
        ctypes.c_uint64, ctypes.c_size_t, ctypes.POINTER(Access), ctypes.c_size_t,
    ),
    "unmap": (ctypes.c_uint64, ctypes.c_size_t),
    "destroy": (ctypes.c_uint64,),
    "free": (ctypes.c_uint64, ctypes.c_size_t),
    "to_host": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t),
    "to_device": (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t),
}  # fmt: skip
"""What is called -> the types of its arguments. Each returns 0, or what went wrong."""


def loaded(name: str) -> str | None:
    """Return the path of the library ``name``, or of a version of it (``name.7``), that this
    process has loaded.
    """
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith(name):
            return f"/{path}"
    return None


class DriverVirtualMemory(VirtualMemory):
    """The memory of device ``index``. Built when the device is taken; called on any thread, as
    torch frees memory wherever its last user lets go.

    Plugins name the library and its functions.
    """

    library_name: ClassVar[str]
    functions: ClassVar[Mapping[str, str]]
    """What is called, as in SIGNATURES -> the name of the driver's function."""

    def __init__(self, index: int) -> None:
        library = self._library = self.load()
        self._calls = {}
        for what, arguments in SIGNATURES.items():
            function = getattr(library, self.functions[what])
            function.argtypes, function.restype = arguments, ctypes.c_int
            self._calls[what] = function
        self._location = Location(ON_DEVICE, index)
        self._properties = Properties(kind=PINNED, location=self._location)
        self._handles: dict[int, int] = {}
        size = ctypes.c_size_t()
        self._call("granularity", ctypes.byref(size), ctypes.byref(self._properties), 0)
        self.granularity = size.value

    def load(self) -> ctypes.CDLL:
        """Return the driver's library: the copy that is loaded, whatever its version, as another
        would know nothing of the device that torch took. Raises OSError where there is none.
        """
        return ctypes.CDLL(loaded(self.library_name) or self.library_name)

    @abstractmethod
    def make_current(self) -> None:
        """Make the device that of the calling thread. Called before each function."""

    def told(self, code: int) -> str:
        """Return what the driver says of an error."""
        return f"error {code}"

    def require(self, function: str, code: int) -> None:
        """Raise OSError, or torch.OutOfMemoryError, for a function that did not return success."""
        if code:
            text = f"{function}: {self.told(code)}"
            raise torch.OutOfMemoryError(text) if code == OUT_OF_MEMORY else OSError(code, text)

    def reserve(self, num_bytes: int) -> int:
        """Reserve addresses."""
        address = ctypes.c_uint64()
        self._call("reserve", ctypes.byref(address), num_bytes, self.granularity, 0, 0)
        return address.value

    def map(self, address: int, num_bytes: int) -> None:
        """Create memory, put it behind the range, and let the device use it."""
        handle = ctypes.c_uint64()
        self._call("create", ctypes.byref(handle), num_bytes, ctypes.byref(self._properties), 0)
        try:
            self._call("map", address, num_bytes, 0, handle, 0)
            try:
                access = Access(self._location, READ_WRITE)
                self._call("access", address, num_bytes, ctypes.byref(access), 1)
            except BaseException:
                self._call("unmap", address, num_bytes)
                raise
        except BaseException:
            self._call("destroy", handle)
            raise
        self._handles[address] = handle.value

    def unmap(self, address: int, num_bytes: int) -> None:
        """Take the memory away and give it back."""
        self._call("unmap", address, num_bytes)
        self._call("destroy", self._handles.pop(address))

    def release(self, address: int, num_bytes: int) -> None:
        """Give the addresses back."""
        self._call("free", address, num_bytes)

    def read(self, address: int, into: torch.Tensor) -> None:
        """Copy out; returns when it is done."""
        self._call("to_host", into.data_ptr(), address, into.numel())

    def write(self, address: int, values: torch.Tensor) -> None:
        """Copy in; returns when it is done."""
        self._call("to_device", address, values.data_ptr(), values.numel())

    def _call(self, what: str, *arguments: Any) -> None:
        self.make_current()
        self.require(self.functions[what], self._calls[what](*arguments))
