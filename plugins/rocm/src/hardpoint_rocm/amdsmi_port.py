"""The port to AMD SMI, the driver's management library: what devices there are, without HIP.

Opened and closed within one look. The package ``amdsmi`` is imported when it is first asked; with
no library beside it, importing it fails in many ways.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Iterator
from typing import Any

from attrs import frozen


class SmiAbsentError(Exception):
    """There is no usable AMD SMI here; the text says why. Devices may be there all the same."""


class SmiFailureError(Exception):
    """AMD SMI is there and says what is wrong with the driver."""


@frozen(kw_only=True)
class Gpu:
    """One device in the driver's order: a whole GPU, or one partition of a divided one.

    ``uuid`` has the sixteen digits by which masks name it, or none; partitions of one GPU share
    them. ``gfx`` is its instruction set, ``partition`` how it is divided (``SPX`` is not at all).
    """

    uuid: str
    name: str
    memory_bytes: int | None
    gfx: str | None
    partition: str | None = None


def import_smi() -> Any:
    """Return the module. Raises whatever importing it raises."""
    return importlib.import_module("amdsmi")


def read_gpus(load: Callable[[], Any] = import_smi) -> tuple[Gpu, ...]:
    """Return all GPUs of the driver, hidden ones too.

    Raises SmiAbsentError and SmiFailureError.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints where it looked
            library = load()
    except ModuleNotFoundError as error:
        raise SmiAbsentError("the package amdsmi is not installed") from error
    except Exception as error:
        raise SmiAbsentError("the library of AMD SMI (libamd_smi.so) is not installed") from error
    with _opened(library):
        try:
            return tuple(_gpu(library, each) for each in library.amdsmi_get_processor_handles())
        except library.AmdSmiException as error:
            raise SmiFailureError(f"AMD SMI: {_told(error)}") from error


@contextlib.contextmanager
def _opened(library: Any) -> Iterator[None]:
    try:
        library.amdsmi_init(library.AmdSmiInitFlags.INIT_AMD_GPUS)
    except library.AmdSmiException as error:
        raise SmiFailureError(f"AMD SMI: {_told(error)}") from error
    try:
        yield
    finally:
        with contextlib.suppress(library.AmdSmiException):
            library.amdsmi_shut_down()


def _gpu(library: Any, handle: Any) -> Gpu:
    told = library.amdsmi_get_gpu_asic_info(handle)
    partition = _if_known(library, library.amdsmi_get_gpu_compute_partition, handle)
    return Gpu(
        uuid=_unique_id(told.get("asic_serial")),
        name=_known(told.get("market_name")) or "AMD GPU",
        memory_bytes=_memory(library, handle),
        gfx=_known(told.get("target_graphics_version")),
        partition=_known(partition),
    )


def _unique_id(serial: Any) -> str:
    """Return the digits of ``0x...``, as the runtime has them."""
    text = _known(serial)
    return "" if text is None else text.lower().removeprefix("0x").zfill(16)


def _memory(library: Any, handle: Any) -> int | None:
    kind = library.AmdSmiMemoryType.VRAM
    total = _if_known(library, library.amdsmi_get_gpu_memory_total, handle, kind)
    return None if total is None else int(total)


def _known(value: Any) -> str | None:
    return None if value in (None, "", "N/A") else str(value)


def _if_known(library: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return its answer; None where the driver has none (older ones, cards without partitions)."""
    try:
        return function(*arguments)
    except library.AmdSmiException:
        return None


def _told(error: Exception) -> str:
    """Return what an error says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__
