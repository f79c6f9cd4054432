"""Which GPUs a process sees: ROCR hides some from HIP, and HIP hides some of the rest.

Precedence: ROCm's page "GPU isolation techniques", its runtime (rocclr, ``Device::init``: HIP's
variable, else CUDA's), and torch's ``_parse_visible_devices``, by which an empty one hides all.

| variables | what counts |
|---|---|
| none | all |
| ROCR | the runtime's list, by number or UUID |
| HIP or CUDA | of what ROCR leaves, by number (from 0 again) or UUID; CUDA stands for HIP |
| HIP and CUDA, equal | the same |
| HIP and CUDA, different | a conflict: libraries follow the one or the other |
| HIP or CUDA longer than ROCR's list | a conflict: it names what ROCR hides |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen
from hardpoint_runtime.accelerator.visible_devices import choose, entries

ROCR, HIP, CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


@frozen(kw_only=True)
class Visible:
    """Positions in the driver's order, in logical order; what was wrong with the variables; and
    whether that leaves nothing that could be relied on.
    """

    positions: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    conflict: str | None = None


def visible(uuids: Sequence[str], environ: Mapping[str, str]) -> Visible:
    """Return what a process sees of the GPUs with ``uuids``."""
    rocr, hip, cuda = (environ.get(name) for name in (ROCR, HIP, CUDA))
    if hip is not None and cuda is not None and entries(hip) != entries(cuda):
        return Visible(
            conflict=f"{HIP}={hip} and {CUDA}={cuda} differ, and libraries follow the one or the "
            "other: unset one, or make them equal"
        )
    notes: list[str] = []
    left = tuple(range(len(uuids)))
    if rocr is not None:
        left = _left(ROCR, rocr, left, uuids, notes)
    name, mask = (HIP, hip) if hip is not None else (CUDA, cuda)
    if mask is None:
        return Visible(positions=left, notes=tuple(notes))
    if rocr is not None and len(entries(mask)) > len(entries(rocr)):
        return Visible(
            conflict=f"{name}={mask} names more devices than {ROCR}={rocr} leaves; its numbers "
            "count what is left, from 0"
        )
    return Visible(positions=_left(name, mask, left, uuids, notes), notes=tuple(notes))


def _left(
    name: str, mask: str, among: tuple[int, ...], uuids: Sequence[str], notes: list[str]
) -> tuple[int, ...]:
    def by_name(wanted: str) -> list[int]:
        return [n for n, place in enumerate(among) if _same(uuids[place], wanted)]

    chosen = choose(mask, len(among), by_name)
    if chosen.complaint:
        notes.append(f"{name}={mask}: {chosen.complaint}")
    return tuple(among[place] for place in chosen.positions)


def _same(uuid: str, wanted: str) -> bool:
    """Whether a mask's ``GPU-<16 digits>`` is the device's, whose name may be longer."""
    plain = wanted.removeprefix("GPU-").replace("-", "").lower()
    return bool(plain) and uuid.removeprefix("GPU-").replace("-", "").lower().startswith(plain)
