"""Which GPUs a process sees under CUDA_VISIBLE_DEVICES, by number, UUID or MIG instance."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen
from hardpoint_runtime.accelerator.visible_devices import choose

from hardpoint_cuda.nvml import Gpu

MASK = "CUDA_VISIBLE_DEVICES"


@frozen(kw_only=True)
class Unit:
    """What CUDA takes for one device: a whole GPU, or one instance of a divided one."""

    id: str
    name: str
    memory_bytes: int | None
    capability: tuple[int, int] | None
    is_slice: bool = False


@frozen(kw_only=True)
class Visible:
    """Units in logical order, and what a person should know of them."""

    units: tuple[Unit, ...]
    notes: tuple[str, ...] = ()


def visible(gpus: Sequence[Gpu], mask: str | None) -> Visible:
    """Return what a process sees of ``gpus`` where the variable is ``mask`` (None: not set).

    By the rules of the MIG user guide: of divided GPUs a process sees one instance and no whole GPU
    beside it. A number that names a divided GPU means its first instance.
    """
    units = [_whole(gpu) for gpu in gpus]
    slices = [_part(gpu, n) for gpu in gpus for n in range(len(gpu.slices or ()))]
    everything = [*units, *(part for _, part in slices)]
    first = dict(reversed(slices))

    def by_name(name: str) -> list[int]:
        return [n for n, unit in enumerate(everything) if unit.id and unit.id.startswith(name)]

    notes = []
    if mask is None:
        positions: Sequence[int] = range(len(gpus))
    else:
        chosen = choose(mask, len(gpus), by_name)
        positions = chosen.positions
        if chosen.complaint:
            notes.append(f"{MASK}={mask}: {chosen.complaint}")
    seen: list[Unit] = []
    for place in positions:
        if place < len(gpus) and gpus[place].slices is not None:
            if place not in first:
                notes.append(f"GPU {place} is divided (MIG) and has no instance")
                continue
            seen.append(first[place])
        else:
            seen.append(everything[place])
    parts = [unit for unit in seen if unit.is_slice]
    if parts and len(seen) > 1:
        notes.append(f"of {len(seen)} devices one is used: with MIG a process sees one instance")
    return Visible(units=tuple(parts[:1] or seen), notes=tuple(notes))


def _whole(gpu: Gpu) -> Unit:
    return Unit(
        id=gpu.uuid, name=gpu.name, memory_bytes=gpu.memory_bytes, capability=gpu.capability
    )


def _part(gpu: Gpu, place: int) -> tuple[int, Unit]:
    part = (gpu.slices or ())[place]
    unit = Unit(
        id=part.uuid, name=part.name, memory_bytes=part.memory_bytes, capability=gpu.capability,
        is_slice=True,
    )  # fmt: skip
    return gpu.index, unit
