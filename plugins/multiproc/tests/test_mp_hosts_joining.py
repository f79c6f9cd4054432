"""Several hosts: who may join the leader, and what everybody else is told."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest
from hardpoint.errors import (
    StartTimeoutError,
)
from hardpoint.rpc.network import key_file


def test_a_follower_whose_settings_differ_is_refused_with_both_values(
    cluster, launcher, eventually
):
    wrong = cluster.follow("--dtype", "bfloat16", "--set", "plugins.dummy.num_workers=2")

    def right_when_it_was_refused():
        eventually(lambda: wrong.poll() is not None)
        cluster.follow("--set", "plugins.dummy.num_workers=2")

    thread = threading.Thread(target=right_when_it_was_refused)
    thread.start()
    executor = launcher.start(workers=2, **cluster.keys(dtype="float32"))
    thread.join()
    assert wrong.wait(60) == 1
    said = cluster.said(wrong)
    assert "the key dtype is 'float32' at the leader, 'bfloat16' at" in said
    assert executor.check_health()


@pytest.mark.slow
def test_two_hosts_of_one_rank_are_not_both_let_in(cluster, launcher, eventually):
    both = [cluster.follow("--node-rank", "1") for _ in range(2)]

    def third_when_one_was_refused():
        eventually(lambda: any(process.poll() == 1 for process in both))
        cluster.follow("--node-rank", "2", address="127.0.0.4")

    thread = threading.Thread(target=third_when_one_was_refused)
    thread.start()
    executor = launcher.start(workers=3, **cluster.keys(3))
    thread.join()
    assert executor.check_health()
    executor.shutdown()
    assert sorted(process.wait(60) for process in both) == [0, 1]
    (refused,) = [each for each in both if each.returncode]
    (kept,) = [each for each in both if not each.returncode]
    said = cluster.said(refused)
    assert (
        f"node rank 1 was started twice: process {kept.pid} on host {socket.gethostname()}" in said
    )
    assert f"process {refused.pid} on host" in said


def test_a_follower_may_be_there_before_its_leader(cluster, launcher, eventually):
    key_file.write(cluster.key_file)
    follower = cluster.follow()
    host, port = cluster.leader.split(":")

    def knocked():
        """Whether it came while nobody listened: its connection was refused."""
        with socket.create_server((host, int(port))) as here:
            here.settimeout(0.5)
            with contextlib.suppress(TimeoutError):
                here.accept()[0].close()
                return True
        return False

    eventually(knocked)
    executor = launcher.start(workers=2, **cluster.keys())
    assert executor.check_health()
    executor.shutdown()
    assert follower.wait(60) == 0


@pytest.mark.slow
def test_the_keys_that_a_killed_leader_left_are_nobodys(cluster, drivers, launcher, eventually):
    sets = [part for key, value in cluster.keys().items() for part in ("--set", f"{key}={value}")]
    driver = drivers(cluster.command, "generate", "--raw", "--executor", "mp",
                     "--platform", "dummy", "--load-format", "dummy", "--model", "dummy", *sets,
                     "--set", "plugins.dummy.num_workers=2", "hi", script="-c")  # fmt: skip
    eventually(lambda: cluster.key_file.exists() and cluster.key_file.stat().st_size)
    old = key_file.read(cluster.key_file)
    driver.process.kill()
    driver.process.wait(30)
    assert key_file.read(cluster.key_file) == old, "it was left"
    follower = cluster.follow()  # finds it, and waits for another
    executor = launcher.start(workers=2, **cluster.keys())
    assert executor.check_health()
    assert not cluster.key_file.exists()
    executor.shutdown()
    assert follower.wait(60) == 0


@pytest.mark.slow
def test_a_follower_that_comes_too_late_or_to_nobody_is_told_so(cluster, launcher):
    cluster.follow()
    key_file.write(cluster.key_file)
    executor = launcher.start(workers=2, **cluster.keys())
    late = cluster.follow("--wait", "3")
    assert late.wait(60) == 3
    assert "a group that is complete takes nobody else" in cluster.said(late)
    assert executor.check_health()
    executor.shutdown()
    alone = cluster.follow("--wait", "1")
    assert alone.wait(60) == 3
    assert "is not there, has ended, or has other keys" in cluster.said(alone)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--address", "192.0.2.9"), "--address = '192.0.2.9': is no address of this host: "),
        (("--join", "127.0.0.2:0"), "--join: '127.0.0.2:0' is not of the form HOST:PORT, with a"),
    ],
)
def test_what_a_follower_cannot_do_is_named_by_its_flag(cluster, more, said):
    key_file.write(cluster.key_file)
    follower = cluster.follow(*more)
    assert follower.wait(60) == 2
    assert said in cluster.said(follower)


def test_a_follower_with_another_key_is_not_let_in(cluster, tmp_path, launcher):
    key_file.write(cluster.key_file)
    other = tmp_path / "other"
    key_file.write(other)
    stranger = cluster.follow("--key-file", str(other), "--wait", "2")
    cluster.follow()
    executor = launcher.start(workers=2, **cluster.keys())
    assert executor.check_health()
    assert stranger.wait(60) == 3
    told = ("has other keys than this follower's --key-file", "lets nobody in")  # by then complete
    assert any(each in cluster.said(stranger) for each in told)
    assert cluster.key_file.exists(), "a file that was there stays"


def test_garbage_at_the_port_of_joining_has_no_effect(cluster, launcher, eventually):
    host, port = cluster.leader.split(":")

    def disturb():
        for junk in (b"\0" * 64, b"cos\nsystem\n(S'true'\ntR.", os.urandom(2000)):
            with socket.create_connection((host, int(port)), 30) as stranger:
                stranger.sendall(junk)

    def there():
        try:
            socket.create_connection((host, int(port)), 1).close()
        except OSError:
            return False
        return True

    failed = []

    def first_strangers_then_the_follower():
        try:
            eventually(there)
            disturb()
        except Exception as error:
            failed.append(error)
        cluster.follow()

    thread = threading.Thread(target=first_strangers_then_the_follower)
    thread.start()
    executor = launcher.start(workers=2, **cluster.keys())
    thread.join()
    assert not failed
    assert executor.check_health()


def test_hosts_that_do_not_come_are_named(cluster, launcher):
    with pytest.raises(StartTimeoutError, match="node 1 has not joined"):
        launcher.start(workers=2, **cluster.keys(**{"plugins.mp.start_timeout": 0.5}))
    assert not cluster.key_file.exists()
