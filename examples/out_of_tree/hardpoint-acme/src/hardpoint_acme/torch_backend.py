"""What stands for the vendor's torch extension: a simulated accelerator, a real torch device whose
memory the host cannot read by accident.

Tensors of the device ``acme`` are wrappers on the PrivateUse1 key. What code does with them
arrives in ``__torch_dispatch__`` and is computed on the host tensors inside. As on real hardware,
mixing them with host tensors is an error, and every way to read them on the host is counted.
Process-global, like any torch device; :func:`install` registers it.
"""

# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202, ANN204, ANN205, ANN206, D102, SLF001
# What torch calls here it does not type, and a backend written in Python registers itself by names
# that begin with an underscore.

from __future__ import annotations

import types
import weakref
from collections import Counter

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

NAME = "acme"
MEMORY = 16 << 30

READS = Counter()
"""Operation -> how often the host read device memory through it."""

CALLS = Counter()
"""Operation -> how often the device computed it."""

MODULE = Counter()
"""Function of the device module -> calls."""

LIBRARIES: list[torch.library.Library] = []

HELD: dict[int, weakref.ref[AcmeTensor]] = {}
"""Every tensor that is there, by its identity."""

MOVES = {"aten::copy_", "aten::_to_copy"}


class AcmeTensor(torch.Tensor):
    """A tensor on the device; ``inner`` is the host tensor that stands for its memory."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, inner):
        self.inner = inner
        key = id(self)
        HELD[key] = weakref.ref(self, lambda _: HELD.pop(key, None))

    def __repr__(self):
        return f"AcmeTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        if name not in MOVES:
            # Inference mode brings composite operations here whole; a device has kernels for
            # their parts only.
            parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        check_devices(func, args, kwargs)
        if name == "aten::copy_" and not isinstance(args[0], AcmeTensor):
            READS[name] += 1
            return args[0].copy_(args[1].inner)
        to_host = (
            name == "aten::_to_copy" and torch.device(kwargs.get("device", NAME)).type == "cpu"
        )
        to_host |= name == "aten::_local_scalar_dense"
        (READS if to_host else CALLS)[name] += 1
        result = func(*tree_map(inner, args), **tree_map(inner, kwargs))
        if to_host:
            return result
        for tensor in kwargs.values():  # ``out`` is resized where it is empty, as on a real device
            if isinstance(tensor, AcmeTensor) and tensor.shape != tensor.inner.shape:
                tensor.data = AcmeTensor(tensor.inner)
        # A view is an inference tensor if its base is one, whatever mode is on.
        as_base = func.is_view and not args[0].is_inference()
        with torch.inference_mode(torch.is_inference_mode_enabled() and not as_base):
            wrapped = tree_map(outer, result)
        return return_and_correct_aliasing(func, args, kwargs, wrapped)


def inner(value):
    """Replace device tensors and the device by what stands for them on the host."""
    if isinstance(value, AcmeTensor):
        return value.inner
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return value


def outer(value):
    """Wrap a host tensor."""
    return AcmeTensor(value) if type(value) is torch.Tensor else value


def check_devices(func, args, kwargs):
    """Raise as real devices do for host tensors among device tensors; numbers may mix."""
    if func._schema.name in MOVES:
        return
    for leaf in tree_flatten((args, kwargs))[0]:
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, AcmeTensor) and leaf.dim():
            raise RuntimeError(
                f"{func}: expected all tensors to be on {NAME}:0, found one on {leaf.device}"
            )


def empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    """``aten::empty.memory_format`` on the device."""
    return AcmeTensor(torch.empty(size, dtype=dtype, device="cpu"))


def empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    """``aten::empty_strided`` on the device."""
    return AcmeTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def copy_from(source, destination, non_blocking=False):
    """``aten::_copy_from``: how ``torch.tensor(values, device=...)`` brings its values over."""
    if not isinstance(destination, AcmeTensor):
        READS["aten::_copy_from"] += 1
    inner(destination).copy_(inner(source))
    return destination


class Guard(torch._C._acc.DeviceGuard):
    """Tells torch that the device exists; it has one index only."""

    def type_(self):
        return torch._C._autograd.DeviceType.PrivateUse1


def memory_allocated(device: object = None) -> int:
    """Return the bytes that tensors of the device hold, each piece of memory once."""
    MODULE["memory_allocated"] += 1
    storages = {}
    for reference in tuple(HELD.values()):
        tensor = reference()
        if tensor is not None:
            storage = tensor.inner.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def device_module():
    """Return the module behind ``torch.acme``."""
    module = types.ModuleType(f"torch.{NAME}")

    def counted(name, answer):
        def call(*args, **kwargs):
            MODULE[name] += 1
            return answer

        setattr(module, name, call)

    for name, answer in {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "synchronize": None,
        "manual_seed_all": None,
        "_is_in_bad_fork": False,
        "mem_get_info": (MEMORY, MEMORY),
        "reset_peak_memory_stats": None,
        "max_memory_allocated": 1 << 30,
    }.items():
        counted(name, answer)
    module.memory_allocated = memory_allocated
    return module


def install() -> None:
    """Make ``torch.device("acme")`` usable in this process; once is enough."""
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
