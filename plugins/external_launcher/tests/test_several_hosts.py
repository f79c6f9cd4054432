"""Ranks on several hosts, each with an address of this machine: one group, behind keys."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hardpoint.rpc.network import key_file

DRIVER = "plugins.external_launcher.driver_only=true"
PLUGIN = "plugins.external_launcher"
ADDRESSES = ("127.0.0.1", "127.0.0.2")


def by_hand(rank, node, local):
    return {}


def slurm(rank, node, local):
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
    }


def open_mpi(rank, node, local):
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "3",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(2 - node),
    }


@pytest.fixture
def hosts(launch, tmp_path):
    """Start ranks of a scene; the last one is alone on another host."""

    def start(scene, size, *arguments, launcher=by_hand, key="key", **options):
        def environ(rank):
            node = int(rank == size - 1)
            local = 0 if node else rank
            own = {"LOCAL_RANK": str(local), "ADDRESS_OF_TEST": ADDRESSES[node]}
            return {**own, **launcher(rank, node, local)}

        keys = [f'{PLUGIN}.key_file="{tmp_path / key}"'] if key else []
        return launch(scene, size, *keys, *arguments, environ=environ, **options)

    start.key_file = tmp_path / "key"
    return start


def told(ranks, size):
    assert ranks.wait() == [0] * size, [ranks.error(rank) for rank in range(size)]
    return [ranks.out(rank).splitlines() for rank in range(size)]


def test_ranks_of_two_hosts_are_one_group(hosts, launch):
    ranks = hosts("generate", 2)
    lines = told(ranks, 2)
    assert ["neither encrypt" in ranks.error(rank) for rank in (0, 1)] == [True, False]
    assert [each[:3] for each in lines] == [lines[0][:3]] * 2
    places = [{host for host, _ in json.loads(each[3])} for each in lines]
    assert places == [{ADDRESSES[0]}, {ADDRESSES[1]}], "each rank listens at its own address"
    assert json.loads(lines[0][4]) == [0, 1]
    assert not hosts.key_file.exists(), "what was made for the run is gone"
    alone = told(launch("tokens_of_one", 1), 1)[0]
    assert json.loads(lines[0][0])["greedy"] == json.loads(alone[0])


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [by_hand, slurm, open_mpi])
def test_each_launchers_ranks_may_be_on_several_hosts(hosts, launcher):
    lines = told(hosts("generate", 3, launcher=launcher), 3)
    assert [each[:3] for each in lines] == [lines[0][:3]] * 3
    assert json.loads(lines[0][1]) == [0, 1, 2]


@pytest.mark.slow
def test_rank_0_may_drive_ranks_of_other_hosts_by_names(hosts):
    ranks = hosts("named", 3, DRIVER)
    first, *others = told(ranks, 3)
    assert others == [[], []]
    results, tasks, count, refusal, again = first
    assert results == again
    assert len(json.loads(results)) == 3
    assert len(json.loads(tasks)) == 3
    assert count == "3"
    assert "the way to another host does not support a callable" in refusal
    assert "rpc.pickle" not in refusal


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("mode", [(), (DRIVER,)], ids=["same program", "driver"])
def test_a_rank_killed_is_named_with_its_host(hosts, victim, mode):
    other = 1 - victim
    ranks = hosts("generate", 2, *mode, f'plugins.dummy.fail_at="step@{victim}=kill"')
    assert ranks.wait(victim) == [-signal.SIGKILL]
    assert ranks.wait(other) == [1]
    pid, host = ranks.processes[victim].pid, socket.gethostname()
    assert f"rank {victim} (pid {pid} on host {host} ({ADDRESSES[victim]})) ended" in ranks.out(
        other
    )


@pytest.mark.slow
def test_a_stopped_rank_of_another_host_is_given_up(hosts, launch):
    ranks = hosts("held", 2, "plugins.dummy.silent_after=3.0", f"{PLUGIN}.peer_timeout=3.0")
    for rank in (0, 1):
        launch.settle(lambda rank=rank: "at step" in ranks.out(rank))
    os.kill(ranks.processes[1].pid, signal.SIGSTOP)
    assert ranks.wait(0) == [1]
    assert "worker rank 1 (pid" in ranks.out(0)
    assert "was not heard for" in ranks.out(0) or ") ended" in ranks.out(0)


@pytest.mark.slow
def test_plans_that_differ_are_told_across_hosts(hosts, launch):
    ranks = hosts("differ", 2)
    for rank in (0, 1):
        launch.settle(lambda rank=rank: "at gate" in ranks.out(rank))
        ranks.processes[rank].stdin.write(b"go\n")
        ranks.processes[rank].stdin.flush()
    assert ranks.wait() == [1, 1]
    for rank in (0, 1):
        assert "SchedulerOutput.new on rank 1 is not that on rank 0" in ranks.out(rank)


@pytest.mark.slow
def test_an_error_of_one_rank_reaches_those_of_other_hosts(hosts):
    first, second = told(hosts("failing", 2), 2)
    assert first[1:] == second[1:]
    for lines in (first, second):
        assert lines[0].startswith("1 KeyError"), "its text travels; it itself does not"


def test_without_a_key_file_ranks_of_several_hosts_are_refused_by_its_name(hosts):
    ranks = hosts("generate", 2, key=None)
    assert ranks.wait() == [1, 1]
    for rank in (0, 1):
        assert f"{PLUGIN}.key_file" in ranks.out(rank)
        assert "ranks [1] are not on the host of rank 0" in ranks.out(rank)


@pytest.mark.slow
def test_no_key_of_the_ranks_is_seen(hosts, launch):
    """S7: neither in what a rank was started with nor in what it says."""
    keys = key_file.write(hosts.key_file)
    ranks = hosts("twice_with_a_gate", 2, 'log_level="debug"')
    for rank in (0, 1):
        launch.settle(lambda rank=rank: "at gate" in ranks.out(rank))
    seen = ""
    for process in ranks.processes.values():
        for name in ("cmdline", "environ"):
            seen += Path(f"/proc/{process.pid}/{name}").read_text(errors="replace")
        process.stdin.write(b"go\n")
        process.stdin.flush()
    assert ranks.wait() == [0, 0], [ranks.error(rank) for rank in (0, 1)]
    seen += "".join(ranks.out(rank) + ranks.error(rank) for rank in (0, 1))
    assert str(hosts.key_file) in seen, "the control: what is there is seen"
    assert os.environ["PATH"] in seen
    assert not any(pair.secret in seen for pair in (keys.leader, keys.follower))
    assert hosts.key_file.stat().st_mode & 0o777 == 0o600


def probe():
    """The noting of unpicklers that the suite of executors uses."""
    path = Path(__file__).parents[3] / "tests" / "executor_suite" / "test_suite_never.py"
    spec = importlib.util.spec_from_file_location("suite_never_probe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PROBE


@pytest.mark.slow
@pytest.mark.parametrize("mode", [(), (DRIVER,)], ids=["same program", "driver"])
def test_no_rank_unpickles_anything(hosts, tmp_path, monkeypatch, mode):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(probe())
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    found = {}
    for pickling in ("never", "local"):
        monkeypatch.setenv("UNPICKLED", str(tmp_path / pickling))
        ranks = hosts("steps", 2, *mode, f'rpc.pickle="{pickling}"')
        told(ranks, 2)
        notes = [line.split() for line in (tmp_path / pickling).read_text().splitlines()]
        for rank in (0, 1):
            pid = str(ranks.processes[rank].pid)
            found[pickling, rank] = [what for process, what in notes if process == pid]
    assert found["never", 0] == found["never", 1] == ["begun"]
    assert len(found["local", 0]) > 1, "the control: what stays in a process is pickled there"
    if mode:  # else rank 1 makes every call itself
        assert found["local", 1] == ["begun"]


COMMAND = "import sys; from hardpoint.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["static", "c10d"])
def test_torchruns_nodes_are_one_group_of_the_cpu_platform(tmp_path, way):
    """Two nodes, each with a torchrun of its own: token ids as of one process."""
    with socket.create_server((ADDRESSES[0], 0)) as server:
        port = server.getsockname()[1]
    program = tmp_path / "main.py"
    program.write_text(COMMAND)
    common = ["generate", "--raw", "--json", "--max-tokens", "6", "--seed", "1", "Good morning"]
    launched = ["--executor", "external_launcher", "--tensor-parallel-size", "3"]
    launched += ["--set", f"{PLUGIN}.key_file={tmp_path / 'key'}"]
    running = []
    for node, address in enumerate(ADDRESSES):
        meeting = ["--master-addr", ADDRESSES[0], "--master-port", str(port),
                   "--node-rank", str(node)]  # fmt: skip
        if way == "c10d":
            meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{port}",
                       "--rdzv-id", "test", "--local-addr", address]  # fmt: skip
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
                   "--nproc-per-node", str(2 - node), *meeting, str(program), *common, *launched,
                   "--set", f"{PLUGIN}.address={address}"]  # fmt: skip
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        running.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                             env=environ)
        )  # fmt: skip
    said = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    one = subprocess.run(
        [sys.executable, str(program), *common], capture_output=True, text=True, check=True
    )
    printed = [out for out, _ in said if out.strip()]
    assert len(printed) == 1, "rank 0 alone prints"
    assert ids(printed[0]) == ids(one.stdout)


def ids(text):
    return json.loads(text[text.index("{") :])["results"][0]["token_ids"]
