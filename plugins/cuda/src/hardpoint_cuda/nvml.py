"""The port to NVML, the driver's management library: what devices there are, without CUDA.

Opened and closed within one look. ``nvidia-ml-py`` is imported when it is first asked.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from attrs import frozen


class NvmlAbsentError(Exception):
    """There is no usable NVML here; the text says why. Devices may be there all the same."""


class NvmlFailureError(Exception):
    """NVML is there and says what is wrong with the driver."""


@frozen(kw_only=True)
class Slice:
    """One instance of a GPU that is divided (MIG)."""

    uuid: str
    name: str
    memory_bytes: int | None


@frozen(kw_only=True)
class Gpu:
    """One GPU, by NVML's number (the order of the PCI bus). ``slices`` is None if it is whole."""

    index: int
    uuid: str
    name: str
    memory_bytes: int | None
    capability: tuple[int, int] | None
    slices: tuple[Slice, ...] | None = None


def import_nvml() -> Any:
    """Return the module of ``nvidia-ml-py``. Raises ImportError."""
    return importlib.import_module("pynvml")


def read_gpus(load: Callable[[], Any] = import_nvml) -> tuple[Gpu, ...]:
    """Return all GPUs of the driver, hidden ones too.

    Raises NvmlAbsentError and NvmlFailureError.
    """
    try:
        library = load()
    except ImportError as error:
        raise NvmlAbsentError("the package nvidia-ml-py is not installed") from error
    with _opened(library):
        try:
            return tuple(_gpu(library, n) for n in range(library.nvmlDeviceGetCount()))
        except library.NVMLError as error:
            raise NvmlFailureError(f"NVML: {error}") from error


@contextlib.contextmanager
def _opened(library: Any) -> Iterator[None]:
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        told = f"NVML: {error}"
        if error.value in (
            library.NVML_ERROR_LIBRARY_NOT_FOUND,
            library.NVML_ERROR_FUNCTION_NOT_FOUND,
        ):
            raise NvmlAbsentError(told) from error
        raise NvmlFailureError(told) from error
    try:
        yield
    finally:
        with contextlib.suppress(library.NVMLError):
            library.nvmlShutdown()


def _gpu(library: Any, index: int) -> Gpu:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    asked = library.nvmlDeviceGetCudaComputeCapability
    capability = _unless_unsupported(library, asked, handle)
    return Gpu(
        index=index,
        uuid=_text(library.nvmlDeviceGetUUID(handle)),
        name=_text(library.nvmlDeviceGetName(handle)),
        memory_bytes=_memory(library, handle),
        capability=None if capability is None else (capability[0], capability[1]),
        slices=_slices(library, handle),
    )


def _memory(library: Any, handle: Any) -> int | None:
    """Return the bytes of its memory; None where it shares the host's."""
    info = _unless_unsupported(library, library.nvmlDeviceGetMemoryInfo, handle)
    return None if info is None else int(info.total)


def _slices(library: Any, handle: Any) -> tuple[Slice, ...] | None:
    """Return the instances of a GPU that is divided; older drivers know of none."""
    mode = _unless_unsupported(library, library.nvmlDeviceGetMigMode, handle)
    if mode is None or mode[0] != library.NVML_DEVICE_MIG_ENABLE:
        return None
    found = []
    for place in range(library.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = library.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
        except library.NVMLError as error:
            if error.value == library.NVML_ERROR_NOT_FOUND:
                continue  # a place without an instance
            raise
        found.append(
            Slice(
                uuid=_text(library.nvmlDeviceGetUUID(part)),
                name=_text(library.nvmlDeviceGetName(part)),
                memory_bytes=_memory(library, part),
            )
        )
    return tuple(found)


def _unless_unsupported(library: Any, function: Callable[[Any], Any], handle: Any) -> Any:
    try:
        return function(handle)
    except library.NVMLError as error:
        if error.value in (
            library.NVML_ERROR_NOT_SUPPORTED,
            library.NVML_ERROR_FUNCTION_NOT_FOUND,
        ):
            return None
        raise


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
