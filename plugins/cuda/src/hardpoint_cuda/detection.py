"""Which GPUs could be used here? Asks NVML, else the system's files; CUDA is never initialised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import field, frozen
from hardpoint.records import Device
from hardpoint_runtime.accelerator.surroundings import Sighting, Surroundings

from hardpoint_cuda.compute_capability import features_of, least
from hardpoint_cuda.nvml import Gpu, NvmlAbsentError, NvmlFailureError, import_nvml, read_gpus
from hardpoint_cuda.system_files import find_gpus
from hardpoint_cuda.visible_gpus import MASK, Unit, visible

ORDER = "CUDA_DEVICE_ORDER"


@frozen(kw_only=True)
class CudaSurroundings(Surroundings):
    """Also how NVML is loaded."""

    nvml: Callable[[], Any] = field(default=import_nvml)


def look(around: CudaSurroundings) -> Sighting:
    """Look for GPUs. Raises nothing; every reason against them is told at once."""
    build = around.torch()
    reasons = [*around.without_torch("cuda", "CUDA")]
    gpus, notes, failures = _all_gpus(around)
    reasons += failures
    mask = around.environ.get(MASK)
    seen = visible(gpus, mask)
    if gpus and not seen.units:
        reasons += seen.notes or (f"{MASK}={mask} hides every GPU",)
    reasons += _too_old(seen.units, build)
    if len({unit.name for unit in seen.units}) > 1 and around.environ.get(ORDER) != "PCI_BUS_ID":
        notes += (f"mixed GPUs are numbered by speed; {ORDER}=PCI_BUS_ID numbers them as here",)
    return Sighting(
        devices=() if reasons else tuple(map(_device, range(len(seen.units)), seen.units)),
        features=_common(seen.units),
        reasons=tuple(reasons),
        notes=(*notes, *seen.notes),
    )


def _all_gpus(
    around: CudaSurroundings,
) -> tuple[tuple[Gpu, ...], tuple[str, ...], tuple[str, ...]]:
    """Return (GPUs, notes, reasons why there are none)."""
    try:
        gpus = read_gpus(around.nvml)
    except NvmlFailureError as error:
        return (), (), (str(error),)
    except NvmlAbsentError as error:
        found = find_gpus(around)
        if found.gpus:
            return found.gpus, (f"found by its files, without memory or generation ({error})",), ()
        return (), (), (str(error), *found.reasons)
    return gpus, (), () if gpus else ("NVML knows of no GPU",)


def _too_old(units: Sequence[Unit], build: Mapping[str, str | None]) -> Sequence[str]:
    lowest = least(build)
    old = [unit for unit in units if unit.capability is not None and unit.capability < lowest]
    of = f"torch {build.get('__version__')} for CUDA {build.get('cuda')}"
    return [
        f"{unit.name} has compute capability {_dotted(unit.capability)}, {_dotted(lowest)} is the "
        f"least of {of}"
        for unit in old[:1]
    ]


def _common(units: Sequence[Unit]) -> dict[str, object]:
    """Return what all of them can do, as far as it is known."""
    known = [features_of(unit.capability) for unit in units if unit.capability is not None]
    each = [features for features in known if features is not None]
    if not each:
        return {}
    return {
        "generation": " and ".join(dict.fromkeys(features.generation for features in each)),
        "bfloat16": all(features.bfloat16 for features in each),
        "float8": all(features.float8 for features in each),
        "shared_kib": min(features.shared_kib for features in each),
    }


def _device(number: int, unit: Unit) -> Device:
    return Device(id=str(number), name=unit.name, memory_bytes=unit.memory_bytes)


def _dotted(version: tuple[int, int] | None) -> str:
    return ".".join(map(str, version or ()))
