"""Nothing of another process is opened on the word of a stranger, who may write into the store."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from attrs import evolve
from hardpoint.errors import ExecutorFailedError, WorkerDiedError
from hardpoint.rpc.network.store import StoreLostError
from hardpoint_external_launcher.launchers import seat_of
from hardpoint_external_launcher.lines import Line, born_at
from hardpoint_external_launcher.places import HostPlace
from hardpoint_external_launcher.presence import PROOF, Presence

OWN = os.getpid()


@pytest.fixture
def presence():
    """One that this process wrote and proves."""
    proof = os.memfd_create(PROOF, os.MFD_CLOEXEC)
    made = Presence(
        rank=1, pid=OWN, born=born_at(OWN), host="h", offers={0: 5}, memory=-1, board=-1,
        seed=5, identity={}, proof=proof,
    )  # fmt: skip
    made.prove()
    yield made
    os.close(proof)


def read(presence):
    """Return it as another rank reads it."""
    return Presence.of(presence.rank, presence.text().encode())


def test_a_presence_is_proven_by_the_process_that_it_names_alone(presence):
    read(presence).verify()
    for change in (
        {"offers": {0: 6}},
        {"memory": 3},
        {"board": 3},
        {"seed": 6},
        {"proof": 0},
        {"proof": 99_999},
        {"pid": os.getppid(), "born": born_at(os.getppid())},
    ):
        forged = read(evolve(presence, **change))
        with pytest.raises(ExecutorFailedError, match=r"a stranger writes there|looked into"):
            forged.verify()
    with pytest.raises(WorkerDiedError):
        evolve(presence, born=1, proof=0).verify()
    with pytest.raises(ExecutorFailedError, match="a stranger writes"):  # of memory by another name
        evolve(presence, proof=_memory("other", presence)).verify()


def _memory(name, presence):
    memory = os.memfd_create(name)
    os.write(memory, presence._digest())
    return memory


@pytest.mark.parametrize("kind", ["file", "memory", "socket"])
def test_a_line_is_a_pipe_and_nothing_else(tmp_path, kind):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    held = {
        "file": lambda: os.open(precious, os.O_RDWR),
        "memory": lambda: os.memfd_create("x"),
        "socket": lambda: os.eventfd(0),
    }[kind]()
    line = Line(1)
    try:
        with pytest.raises(WorkerDiedError):
            line.connect(OWN, born_at(OWN), held)
        assert line._write == -1
    finally:
        line.close()
        os.close(held)
    assert precious.read_text() == "precious"


HOLDER = "import sys, time; f = open(sys.argv[1], 'r+b'); print(f.fileno(), flush=True); input()"


@pytest.mark.parametrize(
    "field",
    [
        "offers",
        pytest.param("memory", marks=pytest.mark.slow),
        pytest.param("board", marks=pytest.mark.slow),
    ],
)
def test_a_file_that_another_process_has_open_is_not_written_to(launch, tmp_path, field):
    """Whatever is written of a rank that has not come, or of rank 0: by another process of this
    user, as no other gets to the store.
    """
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious\n" * 50)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(precious)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    real, forged = (0, 1) if field == "offers" else (1, 0)
    ranks = launch("steps", 2, only=[real])
    place = HostPlace(seat_of(launch.module.variables(forged, 2, ranks.port)))
    try:
        descriptor = int(holder.stdout.readline())
        if forged == 0:
            place.serve()
        found = []

        def reached():
            try:
                found[:] = [place.reach(1.0)]
            except StoreLostError:
                return False
            return True

        launch.settle(reached)
        (store,) = found
        launch.settle(lambda: store.check([f"hardpoint///1/{real}"]))
        own = json.loads(store.get(f"hardpoint///1/{real}"))
        told = {**own, "rank": forged, "pid": holder.pid, "born": born_at(holder.pid)}
        told[field] = {str(real): descriptor} if field == "offers" else descriptor
        store.set(f"hardpoint///1/{forged}", json.dumps(told))
        assert ranks.wait(real) == [1]
        assert f"was not written by process {holder.pid}" in ranks.out(real), ranks.error(real)
        assert precious.read_bytes() == b"precious\n" * 50
    finally:
        place.close()
        holder.communicate("\n", timeout=60)
