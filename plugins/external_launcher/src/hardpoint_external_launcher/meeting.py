"""How the processes of one launcher meet: each says in the store who it is; from then on they have
lines of their own.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from attrs import define
from hardpoint.errors import UnsupportedError, WorkerDiedError

from hardpoint_external_launcher.agreement import check_identities
from hardpoint_external_launcher.launchers import Seat
from hardpoint_external_launcher.lines import Line, born_at
from hardpoint_external_launcher.presence import Presence
from hardpoint_external_launcher.store import Store

LARGEST_SEED = 2**56


@define(eq=False)
class Company:
    """The ranks, once each knows all: the lines to the others, and who is who.

    ``memory`` is a descriptor of this process for what the ranks of the host share, ``board`` one
    for the claims, ``seed`` what is drawn once for all.
    """

    presences: list[Presence]
    lines: dict[int, Line]
    memory: int
    board: int
    store: Store

    @property
    def seed(self) -> int:
        """A number that was drawn once for all ranks."""
        return self.presences[0].seed

    def met(self) -> None:
        """All have greeted each other: the store is needed no more."""
        self.store.close()

    def close(self) -> None:
        """Give back what is not the lines'. Idempotent."""
        self.store.close()
        held = {self.memory, self.board}
        self.memory = self.board = -1
        for descriptor in held - {-1}:
            os.close(descriptor)


def meet(seat: Seat, identity: Mapping[str, str], timeout: float, board: int) -> Company:
    """Return when every rank of ``seat``'s launcher has told who it is, and lines to all are open.

    ``board`` is the descriptor of the claims that rank 0 made, which is the company's from now on.
    Raises StartTimeoutError naming who did not come, WorkerDiedError for who came and is gone,
    ConfigError and PluginError for ranks that were started differently.
    """
    with ExitStack() as undo:
        lines = {rank: Line(rank) for rank in range(seat.world_size) if rank != seat.rank}
        for line in lines.values():
            undo.callback(line.close)
        memory = os.memfd_create("hardpoint-rendezvous", os.MFD_CLOEXEC) if seat.rank == 0 else -1
        store = Store(seat, time.monotonic() + timeout, timeout)
        company = Company(presences=[], lines=lines, memory=memory, board=board, store=store)
        undo.callback(company.close)
        own = Presence(
            rank=seat.rank,
            pid=os.getpid(),
            born=born_at(os.getpid()),
            host=_this_host(),
            offers={rank: line.offer for rank, line in lines.items()},
            memory=memory,
            board=board,
            seed=secrets.randbelow(LARGEST_SEED),
            identity=identity,
        )
        company.presences = store.gather(own)
        check_identities({each.rank: each.identity for each in company.presences})
        _require_one_host(company.presences)
        for rank, line in lines.items():
            peer = company.presences[rank]
            line.connect(peer.pid, peer.born, peer.offers[seat.rank])
        leader = company.presences[0]
        if seat.rank:
            company.memory = _opened(leader, leader.memory)
            company.board = _opened(leader, leader.board) if leader.board >= 0 else -1
        undo.pop_all()
        return company


def _opened(peer: Presence, descriptor: int) -> int:
    try:
        return os.open(f"/proc/{peer.pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise WorkerDiedError(rank=peer.rank, pid=peer.pid, exit=None) from error


def _this_host() -> str:
    """Return what only processes have in common that see each other: the boot, and the space of
    process numbers.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def _require_one_host(presences: list[Presence]) -> None:
    hosts = {each.rank: each.host for each in presences}
    away = [rank for rank, host in hosts.items() if host != hosts[0]]
    if away:
        raise UnsupportedError(
            f"ranks on several hosts (not on that of rank 0: {away})",
            "hardpoint-external-launcher",
            reason="they do not see rank 0's process, of another host or container",
            hint="Start all on one host, outside containers or all in one.",
        )
