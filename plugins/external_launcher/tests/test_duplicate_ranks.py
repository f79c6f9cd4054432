"""Two processes of one rank are refused at once, and both are named."""

from __future__ import annotations

import os
import re
import socket
from datetime import timedelta

import pytest
import torch.distributed
from hardpoint.errors import ConfigError, ExecutorFailedError
from hardpoint.rpc.network import key_file
from hardpoint_external_launcher.launchers import Seat
from hardpoint_external_launcher.lines import born_at
from hardpoint_external_launcher.seats import Occupant, Seats, engines

HOST = socket.gethostname()


def named(ranks, rank, *names, key="RANK"):
    """Return a pattern of what is said of two processes, of which either may have come first."""
    first, second = (f"process {ranks.processes[name].pid} on host {HOST}" for name in names)
    both = (
        f"({first} has this rank, and so has {second}|{second} has this rank, and so has {first})"
    )
    return rf"rank {rank} was started twice: {key} = {rank}: {both}"


def test_a_rank_that_is_there_twice_ends_all_that_wait_with_it(launch):
    """Rank 2 is missing, and rank 1 there twice: all are told, long before the deadline."""
    ranks = launch("steps", 3, only=[0, 1])
    ranks.start(1, "again")
    assert ranks.wait() == [1, 1, 1]
    for name in ranks.processes:
        assert re.search(named(ranks, 1, 1, "again"), ranks.out(name)), ranks.error(name)
        assert "StartTimeoutError" not in ranks.out(name)


@pytest.mark.slow
def test_two_ranks_0_are_told_apart_from_a_port_that_is_taken(launch):
    ranks = launch("steps", 3, only=[0])
    ranks.start(0, "again")
    ranks.start(1)
    assert ranks.wait(0, "again") == [1, 1]
    for name in (0, "again"):
        assert re.search(named(ranks, 0, 0, "again"), ranks.out(name)), ranks.error(name)


@pytest.mark.slow
def test_overlapping_ranks_of_slurm_are_named_by_its_variable(launch):
    def slurm(rank):
        return {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "0",
                "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "LOCAL_RANK": "0"}  # fmt: skip

    ranks = launch("steps", 3, only=[0, 1], environ=slurm)
    ranks.start(1, "again")
    assert ranks.wait() == [1, 1, 1]
    for name in ranks.processes:
        assert re.search(named(ranks, 1, 1, "again", key="SLURM_PROCID"), ranks.out(name))


@pytest.fixture
def agent():
    """A store that is there before and after the ranks, as torchrun's is."""
    made = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield made
    del made


@pytest.fixture
def key(tmp_path):
    """The setting of a key file that stays."""
    key_file.write(tmp_path / "key")
    return f'plugins.external_launcher.key_file="{tmp_path / "key"}"'


def elastic(agent):
    """Return what torchrun tells, whose store ranks use that have a key file."""
    return lambda rank: {
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_PORT": str(agent.port),
    }


@pytest.mark.slow
def test_who_comes_when_all_have_met_is_refused_and_disturbs_nobody(launch, agent, key):
    """By torchrun's store, which stays; also the next engine of the same processes starts."""
    ranks = launch("twice_with_a_gate", 2, key, environ=elastic(agent))
    for rank in (0, 1):
        launch.settle(lambda rank=rank: "at gate" in ranks.out(rank))
    ranks.start(1, "late")
    assert ranks.wait("late") == [1]
    assert re.search(named(ranks, 1, 1, "late"), ranks.out("late"))
    for rank in (0, 1):
        ranks.processes[rank].stdin.write(b"go\n")
        ranks.processes[rank].stdin.flush()
    assert ranks.wait(0, 1) == [0, 0], [ranks.error(rank) for rank in (0, 1)]


@pytest.mark.slow
def test_a_process_may_follow_another_of_its_rank(launch, agent, key):
    first = launch("steps", 2, key, environ=elastic(agent))
    assert first.wait() == [0, 0], [first.error(rank) for rank in (0, 1)]
    second = launch("steps", 2, key, environ=elastic(agent))
    assert second.wait() == [0, 0], [second.error(rank) for rank in (0, 1)]


# Seats alone.


def occupant(**more):
    own = {"pid": os.getpid(), "born": born_at(os.getpid()), "host": "here", "name": "node"}
    return Occupant(**{**own, **more})


def seats(agent, rank, secret=b""):
    client = torch.distributed.TCPStore(
        "127.0.0.1", agent.port, is_master=False, timeout=timedelta(seconds=30)
    )
    seat = Seat(launcher="x", rank=rank, world_size=3, local_rank=0)
    return Seats(client, "hardpoint/run", seat, secret)


def test_a_seat_is_kept_by_who_lives_and_told_to_those_who_look(agent):
    first, other = seats(agent, 1), seats(agent, 0)
    assert not other.has(1)
    first.take(occupant())
    first.take(occupant())  # the next engine of the same process
    assert other.has(1)
    other.check(1)
    agent.add(engines("hardpoint/run", 1), 1)
    second = seats(agent, 1)
    with pytest.raises(
        ConfigError, match=r"process 7 on host far.*Start one process for"
    ) as caught:
        second.take(occupant(pid=7, host="there", name="far"))
    assert [each.key for each in caught.value.problems] == ["RANK"]
    with pytest.raises(ConfigError, match=rf"{os.getpid()} on host node has this rank, and so has"):
        other.check(1)
    other.check(2)  # the next engine: that one came too late for the one before


def test_a_seat_of_a_process_that_ended_is_free(agent):
    seats(agent, 1).take(occupant(born=1))
    seats(agent, 1).take(occupant())
    with pytest.raises(ConfigError, match="twice"):
        seats(agent, 1).take(occupant(pid=1, born=born_at(1)))
    with pytest.raises(ConfigError, match="twice"):  # of another host nothing is known
        seats(agent, 1).take(occupant(born=1, host="there"))


@pytest.mark.parametrize("text", [b"", b"\x80\x04.", b"[]", b"{}", b'{"pid": "x"}', b"[" * 50_000])
@pytest.mark.parametrize("secret", [b"", b"secret"])
def test_what_strangers_write_of_seats_is_an_error_and_nothing_else(agent, text, secret):
    agent.set("hardpoint/run/seats/1", text or b"{")
    agent.set("hardpoint/run/twice", text)
    own = seats(agent, 1, secret)
    with pytest.raises(ExecutorFailedError):
        own.take(occupant())
    with pytest.raises(ExecutorFailedError):
        own.check(1)


def test_a_seat_is_sealed_by_the_secret(agent):
    seats(agent, 1, b"secret").take(occupant())
    with pytest.raises(ExecutorFailedError, match="not sealed by this rank's key file"):
        seats(agent, 1, b"other").take(occupant())
