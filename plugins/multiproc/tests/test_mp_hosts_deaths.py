"""Several hosts: whatever dies, hangs or leaves on one is named on the other."""

from __future__ import annotations

import os
import signal
import socket
import threading

import psutil
import pytest
from hardpoint.errors import (
    HostLostError,
    WorkerDiedError,
    WorkerHungError,
    WorkerSilentError,
)
from hardpoint_multiproc import group
from hardpoint_multiproc.hosts import start
from hardpoint_multiproc.hosts.leader import Hosts


@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.slow)]
)
def test_a_worker_that_dies_on_another_host_is_named_with_it(cluster, launcher, eventually, signum):
    cluster.follow()
    executor = launcher.start(workers=2, **cluster.keys())
    victim = executor._resources.group._workers[1].pid
    os.kill(victim, signum)
    error = eventually(lambda: executor.failure)
    assert isinstance(error, WorkerDiedError)
    assert (error.rank, error.pid, error.exit) == (1, victim, -signum)
    assert f"on host {socket.gethostname()} (node 1, {cluster.other})" in str(error)


def test_a_follower_that_dies_is_named_with_its_ranks(cluster, launcher, eventually, family):
    follower = cluster.follow()
    executor = launcher.start(workers=3, **cluster.keys())
    victims = family(follower.pid)
    follower.kill()
    error = eventually(lambda: executor.failure)
    assert isinstance(error, HostLostError)
    assert cluster.other in str(error)
    assert error.ranks == (2,)
    _, alive = psutil.wait_procs(victims, timeout=30)
    assert not alive


def kill_when_joined(cluster, follower, eventually):
    """Kill a follower as soon as it has joined."""
    eventually(lambda: "joined" in cluster.said(follower))
    follower.kill()


def test_a_follower_that_dies_while_another_is_awaited_fails_the_start(
    cluster, launcher, eventually
):
    follower = cluster.follow()
    thread = threading.Thread(target=kill_when_joined, args=(cluster, follower, eventually))
    thread.start()
    with pytest.raises(HostLostError, match=f"node 1, {cluster.other}.* is lost"):
        launcher.start(workers=3, **cluster.keys(3, **{"plugins.mp.start_timeout": 600.0}))
    thread.join()


def test_a_follower_that_dies_between_joining_and_the_start_fails_it(
    cluster, launcher, eventually, monkeypatch
):
    follower = cluster.follow()
    spread = start.spread

    def first_it_dies(executor, settings, hosts, *rest):
        kill_when_joined(cluster, follower, eventually)
        eventually(lambda: hosts._nodes[1].loss)
        told = threading.Event()
        hosts.loop.call(told.set)  # by then it was told to nobody: there is no group yet
        assert told.wait(30)
        return spread(executor, settings, hosts, *rest)

    monkeypatch.setattr(start, "spread", first_it_dies)
    with pytest.raises(HostLostError) as caught:
        launcher.start(workers=2, **cluster.keys(**{"plugins.mp.start_timeout": 600.0}))
    assert caught.value.ranks == (1,)


@pytest.mark.slow
def test_a_follower_that_dies_before_its_worker_is_ready_fails_the_start(
    cluster, launcher, eventually, family
):
    follower = cluster.follow()

    def kill_when_it_works():
        eventually(lambda: len(family(follower.pid)) >= 3)
        follower.kill()

    thread = threading.Thread(target=kill_when_it_works)
    thread.start()
    keys = {"plugins.mp.start_timeout": 600.0, "plugins.dummy.fail_at": "build@1=hang"}
    with pytest.raises(HostLostError) as caught:
        launcher.start(workers=2, **cluster.keys(**keys))
    assert caught.value.ranks == (1,)
    thread.join()


@pytest.mark.slow
def test_a_follower_whose_workers_are_lost_ends_with_what_it_tells_the_leader(
    cluster, launcher, eventually
):
    follower = cluster.follow()
    executor = launcher.start(workers=2, **cluster.keys())
    (nursery,) = psutil.Process(follower.pid).children()
    nursery.kill()
    error = eventually(lambda: executor.failure)
    assert isinstance(error, HostLostError | WorkerDiedError)
    assert follower.wait(60) == 1
    assert f"the nursery (pid {nursery.pid}) was ended by signal 9" in cluster.said(follower)


def test_a_follower_that_is_interrupted_says_so_to_the_leader(cluster, launcher, eventually):
    follower = cluster.follow()
    executor = launcher.start(workers=2, **cluster.keys())
    follower.send_signal(signal.SIGTERM)
    error = eventually(lambda: executor.failure)
    assert isinstance(error, HostLostError)
    assert "SystemExit: 143" in str(error)
    assert follower.wait(30) == 143


def test_the_number_of_a_process_elsewhere_is_never_signalled_here(
    cluster, launcher, eventually, monkeypatch
):
    ended = []
    monkeypatch.setattr(group, "end_group", lambda pid, session: ended.append(pid))
    cluster.follow()
    executor = launcher.start(workers=2, **cluster.keys())
    pids = [worker.pid for worker in executor._resources.group._workers]
    os.kill(executor._resources.nursery.pid, signal.SIGKILL)
    assert eventually(lambda: executor.failure)
    executor.shutdown()
    assert pids[0] in ended
    assert pids[1] not in ended


def test_an_executor_that_has_started_knows_the_processes_elsewhere(cluster, launcher, monkeypatch):
    pass_on = Hosts._pass_on

    def late(hosts, told):
        if told["op"] == "started":
            threading.Timer(0.5, lambda: hosts.loop.call(lambda: pass_on(hosts, told))).start()
        else:
            pass_on(hosts, told)

    monkeypatch.setattr(Hosts, "_pass_on", late)
    cluster.follow()
    executor = launcher.start(workers=2, **cluster.keys())
    assert all(worker.pid > 0 for worker in executor._resources.group._workers)


@pytest.mark.parametrize("how", ["stopped", pytest.param("hung", marks=pytest.mark.slow)])
def test_a_stuck_worker_elsewhere_is_told_with_its_stack(
    cluster, launcher, eventually, is_alive, how
):
    cluster.follow()
    more = {"plugins.dummy.silent_after": 1.0} if how == "stopped" else {"plugins.mp.hang_after": 1}
    executor = launcher.start(
        workers=2, **cluster.keys(**{"plugins.dummy.fail_at": "load:2@1=hang", **more})
    )
    stuck = executor._resources.group._workers[1].pid
    assert stuck > 0
    future = executor.collective_rpc("reload_weights", non_block=True)
    eventually(lambda: executor.check_health()[1].busy_since)
    if how == "stopped":
        os.kill(stuck, signal.SIGSTOP)
    error = future.exception(30)
    assert isinstance(error, WorkerSilentError if how == "stopped" else WorkerHungError)
    assert (error.rank, error.pid) == (1, stuck)
    assert "in reload_weights" in error.stack
    executor.shutdown()
    assert not is_alive(stuck)


@pytest.mark.slow
def test_a_follower_that_is_stopped_is_lost_after_the_deadline(cluster, launcher, eventually):
    follower = cluster.follow()
    executor = launcher.start(workers=2, **cluster.keys(**{"plugins.mp.peer_timeout": 2.0}))
    follower.send_signal(signal.SIGSTOP)
    try:
        error = eventually(lambda: executor.failure)
    finally:
        follower.send_signal(signal.SIGCONT)
    assert isinstance(error, HostLostError)
    assert error.ranks == (1,)


@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_followers_end_with_a_leader_that_is_gone(cluster, drivers, eventually, signum, family):
    follower = cluster.follow()
    keys = [
        f"{key}={value}" for key, value in cluster.keys(**{"plugins.mp.peer_timeout": 3.0}).items()
    ]
    sets = [part for key in keys for part in ("--set", key)]
    driver = drivers(cluster.command, "generate", "--raw", "--executor", "mp",
                     "--platform", "dummy", "--load-format", "dummy", "--model", "dummy", *sets,
                     "--set", "plugins.dummy.num_workers=2",
                     "--set", "plugins.dummy.step_seconds=0.2",
                     "--max-tokens", "200", "--ignore-eos", "hi", script="-c")  # fmt: skip
    eventually(lambda: driver.process.stdout.read(1))
    workers = family(follower.pid)
    assert len(workers) >= 3
    driver.process.send_signal(signum)
    assert follower.wait(30) == 3
    assert "its workers here end" in cluster.said(follower)
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive
    driver.process.kill()
    driver.process.wait(30)
