"""What launchers tell a process of itself: its rank, its peers, and where they all meet.

Each launcher is an entry of :data:`LAUNCHERS`. Nothing is made up: a variable that is missing, is
no number, or contradicts another is an error that names it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from attrs import frozen
from hardpoint.errors import ConfigError
from hardpoint.records import Problem

ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"
LARGEST_PORT = 65535
LONGEST_NUMBER = 9
"""Digits of a rank, a size or a port."""


@frozen(kw_only=True)
class Launcher:
    """One launcher by the names of its variables.

    ``signs`` are variables of which each says that this launcher started the process. ``run`` and
    ``attempt`` name one start of the whole group, where it has such names. ``hosts_store``: the
    launcher itself serves the store at the meeting place. ``start`` is how people use it.
    """

    name: str
    signs: tuple[str, ...]
    rank: str
    world_size: str
    local_rank: str
    local_size: str | None
    run: str | None = None
    attempt: str | None = None
    hosts_store: str | None = None
    start: str = ""


TORCHRUN = Launcher(
    name="torchrun",
    signs=("TORCHELASTIC_RUN_ID",),
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    run="TORCHELASTIC_RUN_ID",
    attempt="TORCHELASTIC_RESTART_COUNT",
    hosts_store="TORCHELASTIC_USE_AGENT_STORE",
    start="torchrun --nproc-per-node N",
)
"""https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables"."""

OPEN_MPI = Launcher(
    name="mpirun",
    signs=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    rank="OMPI_COMM_WORLD_RANK",
    world_size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    start=f"mpirun -n N -x {ADDRESS} -x {PORT}",
)
"""https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html"""

SLURM = Launcher(
    name="srun",
    signs=("SLURM_PROCID",),
    rank="SLURM_PROCID",
    world_size="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
    local_size=None,
    run="SLURM_JOB_ID",
    attempt="SLURM_STEP_ID",
    start=f"srun -n N, with {ADDRESS} and {PORT} exported",
)
"""https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES"."""

BY_HAND = Launcher(
    name="the environment",
    signs=("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    start=f"RANK, WORLD_SIZE, LOCAL_RANK, {ADDRESS} and {PORT} set by hand",
)

LAUNCHERS = (TORCHRUN, OPEN_MPI, SLURM, BY_HAND)
"""The innermost first: torchrun is started by the others, and mpirun within an allocation."""


@frozen(kw_only=True)
class Seat:
    """This process among those of its launcher.

    ``address`` and ``port`` are where all meet; None where it is alone. ``run`` tells one start of
    the group from others at the same place. ``hosts_store``: somebody serves a store there already.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    rank_variable: str = "RANK"
    size_variable: str = "WORLD_SIZE"
    local_size: int | None = None
    address: str | None = None
    port: int | None = None
    run: str = ""
    hosts_store: bool = False


def seat_of(environ: Mapping[str, str]) -> Seat:
    """Return this process's seat. Raises ConfigError, which names every variable that is missing,
    is malformed, or contradicts another.
    """
    launcher = _launcher(environ)
    problems: list[Problem] = []
    numbers: dict[str, int] = {}
    least = {launcher.world_size: 1, launcher.local_size: 1}
    for name in (launcher.rank, launcher.world_size, launcher.local_rank, launcher.local_size):
        if name is None or (name == launcher.local_size and name not in environ):
            continue
        value = _number(environ, name, least.get(name, 0), problems)
        if value is not None:
            numbers[name] = value
    problems += _contradictions(launcher, numbers)
    if launcher is not TORCHRUN:
        problems += _disagreements(launcher, numbers, environ)
    address, port = environ.get(ADDRESS) or None, None
    if numbers.get(launcher.world_size, 2) > 1:
        if address is None:
            problems.append(_missing(ADDRESS, "the address at which rank 0 is met"))
        elif not of_one_interface(address):
            problems.append(every_interface(address))
        port = _number(environ, PORT, 1, problems, LARGEST_PORT)
    if problems:
        raise ConfigError(
            f"the variables of {launcher.name} are not as they must be: "
            + "; ".join(map(str, problems)),
            problems=problems,
        )
    return Seat(
        launcher=launcher.name,
        rank=numbers[launcher.rank],
        world_size=numbers[launcher.world_size],
        local_rank=numbers[launcher.local_rank],
        rank_variable=launcher.rank,
        size_variable=launcher.world_size,
        local_size=numbers.get(launcher.local_size or ""),
        address=address,
        port=port,
        run="/".join(environ.get(name or "", "") for name in (launcher.run, launcher.attempt)),
        hosts_store=environ.get(launcher.hosts_store or "") == "True",
    )


def rank_of(environ: Mapping[str, str]) -> int | None:
    """Return this process's rank, None where no launcher told it properly."""
    try:
        return seat_of(environ).rank
    except ConfigError:
        return None


def _launcher(environ: Mapping[str, str]) -> Launcher:
    for launcher in LAUNCHERS:
        if any(name in environ for name in launcher.signs):
            return launcher
    ways = "; ".join(launcher.start for launcher in LAUNCHERS)
    problem = Problem(
        key="executor",
        value="external_launcher",
        message="no launcher started this process: there are none of the variables "
        f"{', '.join(name for launcher in LAUNCHERS for name in launcher.signs)}.",
        way_out=f"Start one process for each worker ({ways}), or use executor = 'mp'.",
    )
    raise ConfigError(str(problem), problems=(problem,))


def _number(
    environ: Mapping[str, str],
    name: str,
    least: int,
    problems: list[Problem],
    most: int | None = None,
) -> int | None:
    text = environ.get(name, "")
    if not text:
        problems.append(_missing(name, "a number"))
        return None
    if (
        not (text.isascii() and text.isdecimal() and len(text) <= LONGEST_NUMBER)
        or int(text) < least
        or int(text) > (most or int(text))
    ):
        upper = "" if most is None else f" and at most {most}"
        problems.append(
            Problem(
                key=name,
                value=text[:80],
                message=f"must be a whole number of at least {least}{upper}.",
                way_out="It is the launcher's to set.",
            )
        )
        return None
    return int(text)


def of_one_interface(address: str) -> bool:
    """Whether it is a name, or a number that does not mean every interface or many hosts."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return True
    return not (found.is_unspecified or found.is_multicast)


def every_interface(address: str) -> Problem:
    """Return the problem of a meeting place that is no single one."""
    return Problem(
        key=ADDRESS,
        value=address,
        message="is no address of one interface: rank 0 listens at an explicit one.",
        way_out="Name that of rank 0's host, such as 10.0.0.5.",
    )


def _missing(name: str, what: str) -> Problem:
    return Problem(
        key=name,
        value=None,
        message=f"is not set: it must be {what}.",
        way_out="Set it, the same way in every process, or start them with torchrun, which does.",
    )


def _contradictions(launcher: Launcher, numbers: Mapping[str, int]) -> list[Problem]:
    pairs = [
        (launcher.rank, launcher.world_size),
        (launcher.local_rank, launcher.local_size),
        (launcher.local_rank, launcher.world_size),
    ]
    return [
        Problem(
            key=inner,
            value=numbers[inner],
            message=f"must be below {outer} = {numbers[outer]}.",
        )
        for inner, outer in pairs
        if outer is not None
        and inner in numbers
        and outer in numbers
        and numbers[inner] >= numbers[outer]
    ]


def _disagreements(
    launcher: Launcher, numbers: Mapping[str, int], environ: Mapping[str, str]
) -> list[Problem]:
    """Return what of the variables set by hand says otherwise than the launcher."""
    pairs = [
        (launcher.rank, BY_HAND.rank),
        (launcher.world_size, BY_HAND.world_size),
        (launcher.local_rank, BY_HAND.local_rank),
    ]
    return [
        Problem(
            key=other,
            value=environ[other],
            message=f"contradicts {name} = {numbers[name]} of {launcher.name}.",
            way_out=f"Unset {other}.",
        )
        for name, other in pairs
        if name != other
        and name in numbers
        and other in environ
        and environ[other] != str(numbers[name])
    ]
