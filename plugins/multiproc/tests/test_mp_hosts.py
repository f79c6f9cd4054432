"""Several hosts: the workers of all are one group, and what listens for them is told."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hardpoint.errors import (
    ConfigError,
    EncodingError,
    WorkerDiedError,
)
from hardpoint.rpc.network import key_file
from hardpoint.rpc.network.listening import listening


def test_the_workers_of_two_hosts_are_one_group(cluster, launcher, caplog, family):
    follower = cluster.follow()
    executor = launcher.start(workers=3, **cluster.keys())
    health = executor.check_health()
    assert [each.rank for each in health] == [0, 1, 2]
    pids = [worker.pid for worker in executor._resources.group._workers]
    here = {each.pid for each in family(os.getpid())}
    there = {each.pid for each in family(follower.pid)}
    assert [pid in there for pid in pids] == [False, False, True]
    assert pids[2] in here  # this test's process started the follower, too
    assert not cluster.key_file.exists(), "what was made for the run is gone: all have joined"
    with pytest.raises(EncodingError, match="the way to another host does not support a callable"):
        executor.collective_rpc(print)
    assert executor.check_health()
    executor.shutdown()
    assert follower.wait(60) == 0
    assert not family(pids[2])
    assert "ranks here: 2" in cluster.said(follower)
    (told,) = [each for each in caplog.messages if "neither encrypt" in each]
    assert told.endswith(f"{cluster.host}, {cluster.other}"), "who is to be kept apart"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has no parts")
def test_workers_elsewhere_take_no_cores_from_those_here(cluster, launcher):
    mine = os.sched_getaffinity(0)
    two = set(sorted(mine)[:2])
    cluster.follow()
    os.sched_setaffinity(0, two)
    try:
        executor = launcher.start(workers=3, **cluster.keys())
    finally:
        os.sched_setaffinity(0, mine)
    first, second, _ = (
        os.sched_getaffinity(worker.pid) for worker in executor._resources.group._workers
    )
    assert first | second == two
    assert not first & second


def test_nothing_listens_but_what_is_told_and_no_key_is_seen(cluster, launcher, family):
    before = listening(os.getpid())
    keys = key_file.write(cluster.key_file)
    follower = cluster.follow()
    executor = launcher.start(workers=2, **cluster.keys())
    told = executor.listeners(executor.config, executor.registry, executor.platform)
    hosts, hub = executor._resources.nursery, executor._resources._hub
    own = {(cluster.host, int(each.rpartition(":")[2])) for each in
           (hosts.address, *hub.addresses.values())}  # fmt: skip
    assert listening(os.getpid()) - before == own
    assert {each.purpose for each in told} >= {"join", "calls", "control"}
    places = {each.address.rpartition(":")[0] for each in told if each.owner == "driver"}
    assert places == {cluster.host}
    others = {each.pid for each in family(os.getpid())} - {os.getpid()}
    assert all(not listening(pid) for pid in others), "the dummy's workers listen nowhere"

    secrets = [keys.leader.secret, keys.follower.secret, hub.gate.keys.secret]
    secrets += [pair.secret for pair in hub.gate._made.values()]
    seen = cluster.said(follower)
    for process in family(os.getpid()):
        with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            seen += repr(process.cmdline()) + repr(process.environ())
    assert not any(secret in seen for secret in secrets)
    assert os.environ["PATH"] in eval(repr(seen)), "the control: what is there is seen"


def test_workers_of_another_host_get_what_was_declared_and_no_more(cluster, launcher, monkeypatch):
    follower = cluster.follow("--set", "plugins.mp.start=plain", environ={"KEPT": "own"})
    for name in ("DRIVER_ONLY", "ALLOWED_ONE", "ALLOWED_TOKEN", "KEPT"):
        monkeypatch.setenv(name, "of the driver")
    keys = cluster.keys(forward_env=("ALLOWED_*",), **{"plugins.mp.start": "plain"})
    executor = launcher.built(workers=2, **keys)
    declared = {"DECLARED": "1", "KEPT": "declared", "DECLARED_PASSWORD": "x"}
    executor.platform.environment = lambda config, placement: declared
    executor.start_workers()
    here, there = (
        psutil.Process(worker.pid).environ() for worker in executor._resources.group._workers
    )
    assert here["DECLARED"] == there["DECLARED"] == "1"
    assert there["ALLOWED_ONE"] == "of the driver"
    assert there["KEPT"] == "own"
    assert not {"DRIVER_ONLY", "ALLOWED_TOKEN", "DECLARED_PASSWORD"} & set(there)
    assert "KEPT = 'own' of this host is kept; the driver's is 'declared'" in cluster.said(follower)


def test_what_a_worker_elsewhere_prints_is_shown_with_its_rank_while_it_runs(
    cluster, launcher, eventually, capsys
):
    cluster.follow()
    executor = launcher.start(workers=2, **cluster.keys())
    victim = executor._resources.group._workers[1].pid
    shown = []

    def write(text):
        with Path(f"/proc/{victim}/fd/2").open("wb", 0) as stream:
            stream.write(text)

    def has(text):
        shown.append(capsys.readouterr().err)
        return text in "".join(shown)

    write(b"one thing\nand another\n")
    eventually(lambda: has("and another"))
    (line,) = [each for each in "".join(shown).splitlines() if "one thing" in each]
    assert f"pid={victim}) one thing" in line
    assert "1" in line.partition("pid=")[0], "the rank precedes it"
    assert executor.check_health()
    for _ in range(64):  # more than may wait
        write(b"y\n" * 2000)
    write(b"the last words\n")
    os.kill(victim, signal.SIGKILL)
    error = eventually(lambda: executor.failure)
    assert isinstance(error, WorkerDiedError)
    assert error.last_lines


def test_the_doctor_tells_what_would_listen(cluster):
    sets = [part for key, value in cluster.keys().items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-P", "-c", cluster.command, "doctor", "--executor", "mp"]
    command += ["--platform", "dummy", "--load-format", "dummy"]
    command += ["--set", "plugins.dummy.num_workers=2"]
    found = []
    for more in (sets, []):
        done = subprocess.run(
            [*command, *more], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    assert cluster.leader in found[0]
    assert all(f"  {purpose} " in found[0] for purpose in ("join", "calls", "control"))
    assert "join" not in found[1].partition("Settings")[0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"plugins.mp.leader": None}, r"several hosts need plugins\.mp\.leader"),
        ({"plugins.mp.key_file": None}, r"several hosts need plugins\.mp\.key_file"),
        ({"plugins.mp.leader": "0.0.0.0:5000"}, "no address of one interface"),
        ({"plugins.mp.leader": "here"}, "not of the form HOST:PORT"),
        ({"plugins.mp.leader": "127.0.0.2:0"}, "with a port from 1"),
        ({"plugins.mp.leader": "192.0.2.1:5000"}, "plugins.mp.leader = .*cannot listen there"),
    ],
    ids=["no leader", "no key file", "every interface", "no port", "port 0", "another host's"],
)
def test_what_is_missing_for_several_hosts_is_named(cluster, launcher, keys, message):
    given = {k: v for k, v in cluster.keys(**keys).items() if v is not None}
    with pytest.raises(ConfigError, match=message):
        launcher.start(workers=2, **given)
    assert not cluster.key_file.exists()


def test_a_port_of_the_leader_that_is_taken_is_named_by_its_key(cluster, launcher):
    place = (cluster.host, int(cluster.leader.rpartition(":")[2]))
    refusal = pytest.raises(ConfigError, match=r"plugins\.mp\.leader = .*Address already in use")
    with socket.create_server(place), refusal:
        launcher.start(workers=2, **cluster.keys())
    assert not cluster.key_file.exists()


def test_the_doctor_asks_for_what_several_hosts_need(launcher):
    executor_class, config, registry, platform = launcher.prepare(workers=2, nnodes=2)
    with pytest.raises(ConfigError, match=r"several hosts need plugins\.mp\.leader"):
        executor_class.listeners(config, registry, platform)
