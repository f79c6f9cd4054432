"""Which cores this process may use, how many threads a worker gets, and binding to them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from attrs import evolve, field, frozen
from hardpoint.procfs import ROOT, read, time_quota
from hardpoint.records import Problem

from hardpoint_cpu.settings import CpuSettings

MOST_CORES = 1 << 16
"""More than any kernel counts."""


@frozen(kw_only=True)
class Cores:
    """The cores in this process's cpuset, as the kernel counts them, and how many cores' worth of
    time a quota leaves it (None: no quota). ``physical``: core -> the lowest of those that are one
    core of the hardware (SMT siblings), where it is not itself.
    """

    ids: tuple[int, ...]
    quota: float | None = None
    physical: Mapping[int, int] = field(factory=dict)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The cores, siblings together."""
        found: dict[int, list[int]] = {}
        for core in self.ids:
            found.setdefault(self.physical.get(core, core), []).append(core)
        return tuple(map(tuple, found.values()))

    @property
    def count(self) -> int:
        """How many threads can really run at once: of siblings one, since both would wait for the
        same arithmetic; never more than the quota, at least one.
        """
        physical = len(self.groups)
        most = physical if self.quota is None else math.ceil(self.quota)
        return max(1, min(physical, most))

    def share(self, index: int, workers: int) -> Cores:
        """Return what worker ``index`` of ``workers`` gets: siblings together while there are
        enough for everyone; an equal part of the quota.
        """
        groups = self.groups
        if workers <= len(groups):
            start, end = index * len(groups) // workers, (index + 1) * len(groups) // workers
            ids = tuple(sorted(core for group in groups[start:end] for core in group))
        else:
            ids = share_of(self.ids, index, workers)
        return evolve(self, ids=ids, quota=self.quota and self.quota / workers)


def usable_cores(root: Path = ROOT, affinity: Iterable[int] | None = None) -> Cores:
    """Return the cores of the cpuset (the affinity mask that the kernel keeps within it), which of
    them are siblings, and the tightest CPU quota of the control groups.
    """
    ids = os.sched_getaffinity(0) if affinity is None else affinity
    ids = tuple(sorted(ids))
    physical = {core: _first_sibling(core, root) for core in ids}
    physical = {core: first for core, first in physical.items() if first != core}
    return Cores(ids=ids, quota=time_quota(root), physical=physical)


def _first_sibling(core: int, root: Path) -> int:
    path = root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
    try:
        return min(parse_cpus((read(path) or "").strip()))
    except ValueError:  # the kernel does not tell
        return core


def parse_cpus(text: str) -> tuple[int, ...]:
    """Return the cores of a list as the kernel writes it (``0-3,6``), rising. Raises ValueError."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        good = first.isdigit() and last.isdigit() and int(first) <= int(last) < MOST_CORES
        if not good:
            raise ValueError(f"{part.strip()!r} is neither a core nor a range as in 0-3,6")
        found.update(range(int(first), int(last) + 1))
    return tuple(sorted(found))


def chosen_cores(settings: CpuSettings, cores: Cores) -> Cores:
    """Return the cores that the settings pick of the usable ones (checked before)."""
    if settings.cpus is None:
        return cores
    wanted = set(parse_cpus(settings.cpus))
    return evolve(cores, ids=tuple(core for core in cores.ids if core in wanted))


def problems(settings: CpuSettings, cores: Cores) -> list[Problem]:
    """Return what of the settings cannot be honoured on the usable ``cores``."""
    found: list[Problem] = []
    usable = _listed(cores.ids)
    if settings.cpus is not None:
        try:
            outside = sorted(set(parse_cpus(settings.cpus)) - set(cores.ids))
            reason = (
                f"cores {_listed(outside)} are not in this process's cpuset." if outside else ""
            )
        except ValueError as error:
            reason = f"{error}."
        if reason:
            way_out = f"Usable cores are {usable}."
            return [
                Problem(
                    key="plugins.cpu.cpus", value=settings.cpus, message=reason, way_out=way_out
                )
            ]
    most = len(chosen_cores(settings, cores).ids)
    if settings.threads is not None and settings.threads > most:
        found.append(
            Problem(
                key="plugins.cpu.threads",
                value=settings.threads,
                message=f"more threads than the {most} cores that may be used ({usable}).",
                way_out=f"Set it to at most {most}, or leave it unset.",
            )
        )
    return found


def share_of(ids: Sequence[int], index: int, workers: int) -> tuple[int, ...]:
    """Return the cores of worker ``index`` of ``workers`` on this host: consecutive, as equal as
    can be; one core serves several where there are fewer cores than workers.
    """
    if workers >= len(ids):
        return (ids[index % len(ids)],)
    start = index * len(ids) // workers
    return tuple(ids[start : (index + 1) * len(ids) // workers])


def thread_count(
    settings: CpuSettings, cores: Cores, environ: Mapping[str, str] | None = None
) -> int:
    """Return the threads of a worker on ``cores``: what the settings say; else what OMP_NUM_THREADS
    says, as far as there are cores; else as many as can run at once.
    """
    if settings.threads is not None:
        return settings.threads
    asked = (os.environ if environ is None else environ).get("OMP_NUM_THREADS", "").split(",")[0]
    if asked.strip().isdigit() and int(asked) > 0:
        return min(int(asked), len(cores.ids))
    return cores.count


def bind(ids: Iterable[int]) -> None:
    """Keep the calling thread, and the threads that it starts from now on, on these cores."""
    os.sched_setaffinity(0, ids)


def _listed(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids))
