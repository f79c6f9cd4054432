"""How the processes of one launcher meet: each says in the store who it is; from then on they have
lines of their own.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define
from hardpoint.config.problems import config_error
from hardpoint.errors import WorkerDiedError
from hardpoint.records import Problem

from hardpoint_external_launcher.agreement import check_identities
from hardpoint_external_launcher.launchers import Seat
from hardpoint_external_launcher.lines import Line, born_at, opened
from hardpoint_external_launcher.places import place_of
from hardpoint_external_launcher.presence import PROOF, Presence
from hardpoint_external_launcher.settings import KEY_FILE, ExternalLauncherSettings
from hardpoint_external_launcher.store import Store

if TYPE_CHECKING:
    from hardpoint.rpc.network.key_file import JoinKeys, RunFile

    from hardpoint_external_launcher.abroad import Abroad

_logger = logging.getLogger("hardpoint.executor.external_launcher")

LARGEST_SEED = 2**56


@define(eq=False)
class Company:
    """The ranks, once each knows all: the lines to the others, and who is who.

    ``memory`` is a descriptor of this process for what workers meet by, ``board`` one for claims
    (-1 where some rank is on another host), ``proof`` one that shows that this rank wrote its
    presence, ``seed`` what is drawn once for all.
    ``abroad`` carries the lines to other hosts, ``made`` is a key file that was made for this run.
    """

    presences: list[Presence]
    lines: dict[int, Line]
    memory: int
    board: int
    proof: int
    store: Store
    abroad: Abroad | None = None
    made: RunFile | None = None
    several_hosts: bool = False

    @property
    def seed(self) -> int:
        """A number that was drawn once for all ranks."""
        return self.presences[0].seed

    def met(self) -> None:
        """All have greeted each other: store, key file and proof are needed no more."""
        self.store.close()
        self._forget_keys()
        self._give_back("proof")

    def close(self) -> None:
        """Give back what is not the lines'. Idempotent."""
        self.store.close()
        self._forget_keys()
        if self.abroad is not None:
            self.abroad.close()
        self._give_back("memory", "board", "proof")

    def _give_back(self, *names: str) -> None:
        for name in names:
            descriptor = getattr(self, name)
            setattr(self, name, -1)
            if descriptor >= 0:
                os.close(descriptor)

    def _forget_keys(self) -> None:
        made, self.made = self.made, None
        if made is not None:
            made.remove()


def meet(
    seat: Seat, identity: Mapping[str, str], settings: ExternalLauncherSettings, board: int
) -> Company:
    """Return when every rank of ``seat``'s launcher has told who it is, and lines to all are open.

    ``board`` is the descriptor of the claims that rank 0 made, which is the company's from now on.
    Raises StartTimeoutError naming who did not come, WorkerDiedError for who came and is gone,
    ConfigError and PluginError for ranks that were started differently, or on several hosts without
    a key file.
    """
    timeout = settings.start_timeout
    with ExitStack() as undo:
        lines = {rank: Line(rank) for rank in range(seat.world_size) if rank != seat.rank}
        for line in lines.values():
            undo.callback(line.close)
        memory = os.memfd_create("hardpoint-rendezvous", os.MFD_CLOEXEC) if seat.rank == 0 else -1
        deadline = time.monotonic() + timeout
        keys, made = _keys(seat, settings)
        secret = b"" if keys is None else keys.shared_secret()
        place = place_of(seat, keys, settings.peer_timeout)
        company = Company(
            presences=[],
            lines=lines,
            memory=memory,
            board=board,
            proof=os.memfd_create(PROOF, os.MFD_CLOEXEC),
            store=Store(place, deadline, timeout, secret),
            made=made,
        )
        undo.callback(company.close)
        abroad = company.abroad = _abroad(seat, settings) if secret else None
        own = Presence(
            rank=seat.rank,
            pid=os.getpid(),
            born=born_at(os.getpid()),
            host=_this_host(settings),
            offers={rank: line.offer for rank, line in lines.items()},
            memory=memory,
            board=board,
            seed=secrets.randbelow(LARGEST_SEED),
            identity=identity,
            proof=company.proof,
            door={} if abroad is None else abroad.door,
            name="" if abroad is None else f"{socket.gethostname()} ({abroad.address})",
        )
        own.prove()
        company.presences = company.store.gather(own)
        check_identities({each.rank: each.identity for each in company.presences})
        away = {rank for rank in lines if company.presences[rank].host != own.host}
        company.several_hosts = len({each.host for each in company.presences}) > 1
        for rank, line in lines.items():
            peer = company.presences[rank]
            if rank in away:
                line.pid, line.host = peer.pid, f"host {peer.name}"
            else:
                peer.verify()
                line.connect(peer.pid, peer.born, peer.offers[seat.rank])
        leader = company.presences[0]
        if company.several_hosts:
            _go_abroad(seat, company, {rank: lines[rank] for rank in away})
        elif seat.rank:
            company.memory = _opened(leader, leader.memory)
            company.board = _opened(leader, leader.board) if leader.board >= 0 else -1
        undo.pop_all()
        return company


def _opened(peer: Presence, descriptor: int) -> int:
    try:
        return opened(peer.pid, descriptor, os.O_RDWR, "/memfd:")
    except OSError as error:
        raise WorkerDiedError(rank=peer.rank, pid=peer.pid, exit=None) from error


def _this_host(settings: ExternalLauncherSettings) -> str:
    """Return what only processes have in common that see each other: the boot, the space of process
    numbers, and the address that they were given.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}/{settings.address or ''}"


def _keys(seat: Seat, settings: ExternalLauncherSettings) -> tuple[JoinKeys | None, RunFile | None]:
    """Return the keys of the key file, None without one, and the file if it was made for this
    run.
    """
    if settings.key_file is None or seat.world_size == 1:
        return None, None
    from hardpoint.rpc.network.key_file import awaited, read_or_write

    path = Path(settings.key_file)
    if seat.rank:
        return awaited(path, settings.start_timeout), None
    keys, made = read_or_write(path)
    return keys, made


def _abroad(seat: Seat, settings: ExternalLauncherSettings) -> Abroad:
    from hardpoint_external_launcher.abroad import Abroad

    place = (seat.address or "", seat.port or 0)
    return Abroad(place, settings.address, settings.peer_timeout)


def _go_abroad(seat: Seat, company: Company, lines: Mapping[int, Line]) -> None:
    """Open the lines to other hosts, and have the ranks meet by rank 0's store. Raises ConfigError
    without a key file.
    """
    abroad, presences = company.abroad, company.presences
    if abroad is None:
        hosts = [each.host for each in presences]
        elsewhere = [rank for rank, host in enumerate(hosts) if host != hosts[0]]
        problem = Problem(
            key=KEY_FILE,
            value=None,
            message=f"ranks {elsewhere} are not on the host of rank 0, or in another container; "
            "what they say to each other is encrypted by keys.",
            way_out=f"Set {KEY_FILE} to a file that all ranks can read; rank 0 makes it if it is "
            "not there.",
        )
        raise config_error([problem])
    from hardpoint.rpc.network.hub import OPEN_TENSORS, rendezvous_file

    if seat.rank == 0:
        _logger.warning(OPEN_TENSORS, ", ".join(sorted({each.name for each in presences})))
    abroad.begin(seat.rank, {each.rank: each.door for each in presences}, lines)
    store = abroad.towards(presences[0].door)
    old = company.memory
    company.memory, _ = rendezvous_file({"listen": abroad.address, "store": store})
    for descriptor in {old, company.board} - {-1}:
        os.close(descriptor)
    company.board = -1
