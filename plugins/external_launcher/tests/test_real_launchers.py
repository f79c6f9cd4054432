"""Slurm's own ``srun`` and Open MPI's own ``mpirun``, where they are installed, over two hosts, of
which each has an address of this machine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).with_name("rank_program.py")
ADDRESSES = ("127.0.0.1", "127.0.0.2")
REMOTE = '#!/bin/sh\nHOST=$1; shift; export ADDRESS_OF_TEST=$HOST; exec sh -c "$*"\n'
"""What mpirun takes for ssh: it runs on this machine whatever is to run on a host."""


def _nodes():
    path = Path(__file__).with_name("slurm_nodes.py")
    spec = importlib.util.spec_from_file_location("external_slurm_nodes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _of_srun(out):
    return [f"--output={out}/%t", f"--error={out}/error-%t"]


@pytest.fixture
def srun():
    nodes = _nodes()
    if missing := [name for name in nodes.NEEDED if nodes.program(name) is None]:
        pytest.skip(f"Slurm is not installed: there is no {missing[0]}")
    folder = tempfile.mkdtemp(prefix="hp-slurm-", dir="/tmp")  # its socket's path must be short
    slurm = nodes.Slurm(folder)
    try:
        try:
            slurm.begin()
        except RuntimeError as error:
            pytest.skip(f"Slurm cannot be started here: {error}")
        inside = 'export ADDRESS_OF_TEST=127.0.0.$((SLURM_NODEID + 1)); exec "$@"'
        command = [
            "srun",
            "-N",
            "2",
            "-n",
            "3",
            "--overcommit",
            "sh",
            "-c",
            inside,
            "sh",
        ]
        yield command, slurm.environ, _of_srun, "{}"
    finally:
        slurm.end()
        shutil.rmtree(folder)


@pytest.fixture
def mpirun(tmp_path):
    if shutil.which("mpirun") is None:
        pytest.skip("Open MPI is not installed: there is no mpirun")
    remote = tmp_path / "remote"
    remote.write_text(REMOTE)
    remote.chmod(0o700)
    command = ["mpirun", "-n", "3", "-host", f"{ADDRESSES[0]}:2,{ADDRESSES[1]}:1",
               "--mca", "plm_rsh_agent", str(remote), "--mca", "plm_rsh_no_tree_spawn", "1",
               "--bind-to", "none", "-x", "MASTER_ADDR", "-x", "MASTER_PORT"]  # fmt: skip
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    environ = {**os.environ, "ADDRESS_OF_TEST": ADDRESSES[0]}
    return command, environ, lambda out: ["--output-filename", str(out)], "1/rank.{}/stdout"


def run(launcher, tmp_path, scene, *arguments):
    """Return the exit code, each rank's lines, and standard error."""
    command, environ, option, each = launcher
    with socket.create_server((ADDRESSES[0], 0)) as server:
        port = server.getsockname()[1]
    out = tmp_path / "out"
    out.mkdir()
    done = subprocess.run(
        [command[0], *option(out), *command[1:], sys.executable, str(PROGRAM), scene, *arguments],
        env={**environ, "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(port)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    lines = [(out / each.format(rank)).read_text().splitlines() for rank in range(3)]
    return done.returncode, lines, done.stderr


def test_every_rank_of_srun_has_the_same_results(srun, tmp_path):
    check(srun, tmp_path)


def test_every_rank_of_mpirun_has_the_same_results(mpirun, tmp_path):
    check(mpirun, tmp_path)


def check(launcher, tmp_path):
    key = tmp_path / "key"
    code, lines, error = run(
        launcher, tmp_path, "generate", f'plugins.external_launcher.key_file="{key}"'
    )
    assert code == 0, error
    assert [each[:3] for each in lines] == [lines[0][:3]] * 3
    assert json.loads(lines[0][1]) == [0, 1, 2]
    places = [{host for host, _ in json.loads(lines[rank][3])} for rank in range(3)]
    assert places == [{ADDRESSES[0]}, {ADDRESSES[0]}, {ADDRESSES[1]}], "two hosts"
    assert not key.exists()
