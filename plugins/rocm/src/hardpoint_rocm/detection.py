"""Which GPUs could be used here? Asks AMD SMI, else the system's files; never initialises HIP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attrs import field, frozen
from hardpoint.records import Device
from hardpoint_runtime.accelerator.surroundings import Sighting, Surroundings

from hardpoint_rocm.amdsmi_port import Gpu, SmiAbsentError, SmiFailureError, import_smi, read_gpus
from hardpoint_rocm.gfx import features_of
from hardpoint_rocm.masks import visible
from hardpoint_rocm.system_files import WSL, closed, find_gpus

WHOLE = "SPX"
"""The partition mode of a GPU that is one device."""


@frozen(kw_only=True)
class RocmSurroundings(Surroundings):
    """Also how AMD SMI is loaded."""

    smi: Callable[[], Any] = field(default=import_smi)


def look(around: RocmSurroundings) -> Sighting:
    """Look for GPUs. Raises nothing; every reason against them is told at once."""
    reasons = [*around.without_torch("hip", "ROCm")]
    gpus, notes, failures = _all_gpus(around)
    reasons += failures
    seen = visible([gpu.uuid for gpu in gpus], around.environ)
    if seen.conflict:
        reasons.append(seen.conflict)
    elif gpus and not seen.positions:
        reasons += seen.notes or ("the variables for visible devices hide every GPU",)
    chosen = [gpus[place] for place in seen.positions]
    reasons += _unknown(chosen)
    return Sighting(
        devices=() if reasons else tuple(map(_device, range(len(chosen)), chosen)),
        features=_common(chosen),
        reasons=tuple(reasons),
        notes=(*notes, *seen.notes, *_divided(chosen)),
    )


def _all_gpus(
    around: RocmSurroundings,
) -> tuple[tuple[Gpu, ...], tuple[str, ...], tuple[str, ...]]:
    """Return (GPUs, notes, reasons why there are none). Without the compute driver's device, or
    the right to open it, there are none to ask about.
    """
    if not around.has(WSL) and (why := closed(around)):
        return (), (), (why,)
    try:
        gpus = read_gpus(around.smi)
    except (SmiAbsentError, SmiFailureError) as error:
        return _from_files(around, str(error))
    return gpus, (), () if gpus else ("AMD SMI knows of no GPU",)


def _from_files(
    around: RocmSurroundings, why: str
) -> tuple[tuple[Gpu, ...], tuple[str, ...], tuple[str, ...]]:
    found = find_gpus(around)
    if found.gpus:
        return found.gpus, (f"found by the system's files ({why})",), ()
    return (), (), (why, *found.reasons)


def _unknown(gpus: Sequence[Gpu]) -> Sequence[str]:
    unknown = [gpu for gpu in gpus if gpu.gfx is not None and features_of(gpu.gfx) is None]
    return [f"{gpu.name} is a {gpu.gfx}, which the kernels are not made for" for gpu in unknown[:1]]


def _common(gpus: Sequence[Gpu]) -> dict[str, object]:
    """Return what all of them can do, as far as it is known."""
    known = [features_of(gpu.gfx) for gpu in gpus if gpu.gfx is not None]
    each = [features for features in known if features is not None]
    if not each:
        return {}
    forms = {features.float8 for features in each}
    waves = {features.wave for features in each}
    return {
        "architecture": " and ".join(dict.fromkeys(features.architecture for features in each)),
        "bfloat16": all(features.bfloat16 for features in each),
        "float8": forms.pop() if len(forms) == 1 else None,
        "wave": waves.pop() if len(waves) == 1 else None,
        "shared_kib": min(features.lds_kib for features in each),
    }


def _divided(gpus: Sequence[Gpu]) -> Sequence[str]:
    modes = sorted({gpu.partition for gpu in gpus if gpu.partition not in (None, WHOLE)})
    return [f"GPUs are divided ({mode}): each partition is a device" for mode in modes if mode]


def _device(number: int, gpu: Gpu) -> Device:
    called = f"{gpu.name} ({gpu.gfx})" if gpu.gfx else gpu.name
    return Device(id=str(number), name=called, memory_bytes=gpu.memory_bytes)
