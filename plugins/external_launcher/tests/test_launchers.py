"""Ranks and the meeting place come from the launcher's variables, and from nowhere else."""

from __future__ import annotations

import pytest
from hardpoint.errors import ConfigError
from hardpoint_external_launcher.launchers import rank_of, seat_of

MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    **MEETING,
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    **MEETING,
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    **MEETING,
}
BY_HAND = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **MEETING}
ALL = {"torchrun": TORCHRUN, "mpirun": OPEN_MPI, "srun": SLURM, "the environment": BY_HAND}


@pytest.mark.parametrize("launcher", ALL)
def test_each_launchers_variables_are_read(launcher):
    seat = seat_of(ALL[launcher])
    assert (seat.launcher, seat.rank, seat.world_size, seat.local_rank) == (launcher, 3, 4, 1)
    assert (seat.address, seat.port) == ("10.0.0.1", 29500)
    assert seat.hosts_store == (launcher == "torchrun")
    assert seat.run == {"torchrun": "job/1", "srun": "77/0"}.get(launcher, "/")
    assert rank_of(ALL[launcher]) == 3


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({**SLURM, **TORCHRUN, "SLURM_PROCID": "1"}, "torchrun"),
        ({**OPEN_MPI, **TORCHRUN, "OMPI_COMM_WORLD_RANK": "1"}, "torchrun"),
        ({**SLURM, **OPEN_MPI, "SLURM_PROCID": "0"}, "mpirun"),
        ({**SLURM, **BY_HAND}, "srun"),
    ],
)
def test_the_innermost_launcher_is_believed(environ, launcher):
    assert seat_of(environ).launcher == launcher
    assert seat_of(environ).rank == 3


REQUIRED = [
    (launcher, name)
    for launcher, environ in ALL.items()
    for name in environ
    if name.endswith(("RANK", "PROCID", "SIZE", "TASKS", "LOCALID", "ADDR", "PORT"))
    and "LOCAL_WORLD" not in name
    and "LOCAL_SIZE" not in name
]


@pytest.mark.parametrize(("launcher", "name"), REQUIRED)
@pytest.mark.parametrize("value", [None, ""])
def test_a_missing_variable_is_named_and_never_made_up(launcher, name, value):
    environ = dict(ALL[launcher])
    del environ[name]
    if value is not None:
        environ[name] = value
    with pytest.raises(ConfigError, match=r"is not set|no launcher") as caught:
        seat_of(environ)
    if "no launcher" not in str(caught.value):
        assert name in [problem.key for problem in caught.value.problems]
    assert rank_of(environ) is None


def test_no_variables_at_all_tell_every_way_to_start():
    with pytest.raises(ConfigError, match="no launcher started this process") as caught:
        seat_of({"PATH": "/bin"})
    for way in ("torchrun", "mpirun", "srun", "by hand", "'mp'"):
        assert way in str(caught.value)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"RANK": "four"}, "RANK"),
        ({"RANK": "-1"}, "RANK"),
        ({"RANK": "1.0"}, "RANK"),
        ({"RANK": "٣"}, "RANK"),
        ({"RANK": "1" * 5000}, "RANK"),
        ({"RANK": "4"}, "RANK"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT"),
        ({"MASTER_ADDR": "0.0.0.0"}, "MASTER_ADDR"),
        ({"MASTER_ADDR": "::"}, "MASTER_ADDR"),
        ({"MASTER_ADDR": "ff02::1%lo"}, "MASTER_ADDR"),
    ],
)
def test_what_cannot_be_is_named_with_its_value(change, name):
    with pytest.raises(ConfigError) as caught:
        seat_of({**TORCHRUN, **change})
    (problem,) = caught.value.problems
    assert problem.key == name
    assert repr(change[name]) in str(problem) or change[name][:80] in str(problem)
    assert len(str(problem)) < 300


def test_everything_wrong_is_told_at_once():
    environ = {"RANK": "x", "WORLD_SIZE": "4"}
    with pytest.raises(ConfigError) as caught:
        seat_of(environ)
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]


@pytest.mark.parametrize(("name", "value"), [("RANK", "2"), ("WORLD_SIZE", "8")])
@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_variables_set_by_hand_may_not_contradict_the_launcher(launcher, name, value):
    with pytest.raises(ConfigError, match=f"contradicts .* of {launcher}") as caught:
        seat_of({**ALL[launcher], name: value})
    assert [problem.key for problem in caught.value.problems] == [name]


def test_one_process_alone_needs_no_meeting_place():
    seat = seat_of({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    assert (seat.address, seat.port) == (None, None)
