"""A Slurm of two nodes on this machine, for tests of its ``srun``: munge, a controller, and a
daemon for each node, all on loopback and in one folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
PATIENCE = 60.0
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores} State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:8
"""


def program(name):
    """Return where a program is, also where only an administrator looks for it."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


class Slurm:
    """Begun by :meth:`begin`; raises RuntimeError where it does not come up."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.environ = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def begin(self):
        for name in ("state", "spool.n1", "spool.n2"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        host, user = socket.gethostname().partition(".")[0], psutil.Process().username()
        text = CONFIGURATION.format(host=host, user=user, folder=self.folder,
                                    ports=[_free_port() for _ in range(3)],
                                    cores=psutil.cpu_count() or 1)  # fmt: skip
        (self.folder / "slurm.conf").write_text(text)
        there = [
            f"--{what}-file={self.folder}/munge.{what}" for what in ("key", "pid", "log", "seed")
        ]
        self._run("munged", "--force", f"--socket={self.folder}/munge.sock", *there)
        self._run("slurmctld")
        for node in ("n1", "n2"):
            self._run("slurmd", "-N", node)
        until = time.monotonic() + PATIENCE
        while "idle" not in self._run("sinfo", "--noheader", "--format=%T %D", "--states=idle"):
            if time.monotonic() > until:
                raise RuntimeError("its nodes are not idle")
            time.sleep(0.2)

    def _run(self, name, *arguments):
        done = subprocess.run([program(name), *arguments], env=self.environ, capture_output=True,
                              text=True, timeout=PATIENCE, check=False)  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stdout}{done.stderr}")
        return done.stdout

    def end(self):
        """End its daemons, each by its own number, and wait for that."""
        daemons = []
        for name in ("slurmd.n1", "slurmd.n2", "slurmctld", "munge"):
            try:
                daemons.append(psutil.Process(int((self.folder / f"{name}.pid").read_text())))
            except (OSError, ValueError, psutil.NoSuchProcess):
                continue
        below = [each for one in daemons for each in one.children(recursive=True)]
        for daemon in daemons:
            daemon.send_signal(signal.SIGTERM)
        _, left = psutil.wait_procs([*daemons, *below], timeout=PATIENCE)
        for process in left:
            process.kill()


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
