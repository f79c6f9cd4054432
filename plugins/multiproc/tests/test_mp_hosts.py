"""Several hosts: each has an address of this machine; the followers join the leader."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from attrs import evolve
from hardpoint.checkpoints.fingerprint import fingerprint
from hardpoint.errors import (
    ConfigError,
    ExecutorFailedError,
    HostLostError,
    StartTimeoutError,
    WorkerDiedError,
    WorkerHungError,
    WorkerSilentError,
)
from hardpoint.metadata import ResolvedPlugin
from hardpoint.rpc.network import key_file
from hardpoint.rpc.network.bounds import Bounds
from hardpoint.rpc.network.hub import codec_across
from hardpoint.rpc.network.keys import KeyPair
from hardpoint.rpc.network.listening import listening
from hardpoint_multiproc import group
from hardpoint_multiproc.hosts import handshake
from hardpoint_multiproc.hosts.follower import Follower
from hardpoint_multiproc.hosts.handshake import difference, installation
from hardpoint_multiproc.hosts.leader import Hosts

LEADER, OTHER = "127.0.0.2", "127.0.0.3"
COMMAND = "import sys; from hardpoint.cli import main; sys.exit(main(sys.argv[1:]))"


def free_port():
    with socket.socket() as probe:
        probe.bind((LEADER, 0))
        return probe.getsockname()[1]


class Cluster:
    """A leader's settings, and the followers that join it."""

    def __init__(self, folder):
        self.key_file = folder / "key"
        self.leader = f"{LEADER}:{free_port()}"
        self.followers = []
        self.log = folder

    def keys(self, nodes=2, **more):
        return {
            "nnodes": nodes,
            "plugins.mp.leader": self.leader,
            "plugins.mp.key_file": str(self.key_file),
            "plugins.mp.start_timeout": 40.0,
            "rpc.heartbeat": 0.2,
            **more,
        }

    def follow(self, *more, environ=None, address=OTHER):
        command = [sys.executable, "-P", "-c", COMMAND, "worker", "--join", self.leader,
                   "--key-file", str(self.key_file), "--address", address,
                   "--wait", "60", *more]  # fmt: skip
        error = (self.log / f"follower{len(self.followers)}").open("w+")
        process = subprocess.Popen(
            command, stderr=error, stdout=error, env={**os.environ, **(environ or {})}
        )
        process.log = error
        self.followers.append(process)
        return process

    def said(self, process):
        process.log.flush()
        return Path(process.log.name).read_text()

    def close(self):
        for process in self.followers:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(60)
            process.log.close()


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path)
    yield made
    made.close()


def family(pid):
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def test_the_workers_of_two_hosts_are_one_group(cluster, launcher, caplog):
    follower = cluster.follow()
    executor = launcher.start(workers=3, **cluster.keys())
    health = executor.check_health()
    assert [each.rank for each in health] == [0, 1, 2]
    pids = [worker.pid for worker in executor._resources.group._workers]
    here = {each.pid for each in family(os.getpid())}
    there = {each.pid for each in family(follower.pid)}
    assert [pid in there for pid in pids] == [False, False, True]
    assert pids[2] in here  # this test's process started the follower, too
    assert not cluster.key_file.exists() or cluster.key_file.stat().st_mode & 0o777 == 0o600
    executor.shutdown()
    assert follower.wait(60) == 0
    assert not cluster.key_file.exists()
    assert not family(pids[2])
    assert "ranks here: 2" in cluster.said(follower)
    (told,) = [each for each in caplog.messages if "neither encrypt" in each]
    assert told.endswith(f"{LEADER}, {OTHER}"), "who is to be kept apart is told, once"


def test_nothing_listens_but_what_is_told_and_no_key_is_seen(cluster, launcher):
    before = listening(os.getpid())
    follower = cluster.follow()
    executor = launcher.start(workers=2, **cluster.keys())
    told = executor.listeners(executor.config, executor.registry, executor.platform)
    hosts, hub = executor._resources.nursery, executor._resources._hub
    own = {(LEADER, int(each.rpartition(":")[2])) for each in
           (hosts.address, *hub.addresses.values())}  # fmt: skip
    assert listening(os.getpid()) - before == own
    assert {each.purpose for each in told} >= {"join", "calls", "control"}
    assert {each.address.rpartition(":")[0] for each in told if each.owner == "driver"} == {LEADER}
    others = {each.pid for each in family(os.getpid())} - {os.getpid()}
    assert all(not listening(pid) for pid in others), "the dummy's workers listen nowhere"

    keys = key_file.read(cluster.key_file)
    secrets = [keys.leader.secret, keys.follower.secret, hub.gate.keys.secret]
    secrets += [pair.secret for pair in hub.gate._made.values()]
    seen = cluster.said(follower)
    for process in family(os.getpid()):
        with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            seen += repr(process.cmdline()) + repr(process.environ())
    assert not any(secret in seen for secret in secrets)
    assert os.environ["PATH"] in eval(repr(seen)), "the control: what is there is seen"


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
    assert f"on host {socket.gethostname()} (node 1, {OTHER})" in str(error)


def test_a_follower_that_dies_is_named_with_its_ranks(cluster, launcher, eventually):
    follower = cluster.follow()
    executor = launcher.start(workers=3, **cluster.keys())
    victims = family(follower.pid)
    follower.kill()
    error = eventually(lambda: executor.failure)
    assert isinstance(error, HostLostError)
    assert OTHER in str(error)
    assert error.ranks == (2,)
    _, alive = psutil.wait_procs(victims, timeout=30)
    assert not alive


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
def test_followers_end_with_a_leader_that_is_gone(cluster, drivers, eventually, signum):
    follower = cluster.follow()
    keys = [
        f"{key}={value}" for key, value in cluster.keys(**{"plugins.mp.peer_timeout": 3.0}).items()
    ]
    sets = [part for key in keys for part in ("--set", key)]
    driver = drivers(COMMAND, "generate", "--raw", "--executor", "mp", "--platform", "dummy",
                     "--load-format", "dummy", "--model", "dummy", *sets,
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
    assert sum("node rank 1 of" in cluster.said(process) for process in both) == 1


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
    assert "is not there, or has ended" in cluster.said(alone)


def test_a_follower_with_another_key_is_not_let_in(cluster, tmp_path, launcher):
    key_file.write(cluster.key_file)
    other = tmp_path / "other"
    key_file.write(other)
    stranger = cluster.follow("--key-file", str(other), "--wait", "2")
    cluster.follow()
    executor = launcher.start(workers=2, **cluster.keys())
    assert executor.check_health()
    assert stranger.wait(60) == 3
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


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"plugins.mp.leader": None}, r"several hosts need plugins\.mp\.leader"),
        ({"plugins.mp.key_file": None}, r"several hosts need plugins\.mp\.key_file"),
        ({"plugins.mp.leader": "0.0.0.0:5000"}, "no address of one interface"),
        ({"plugins.mp.leader": "here"}, "not of the form HOST:PORT"),
    ],
    ids=["no leader", "no key file", "every interface", "no port"],
)
def test_what_is_missing_for_several_hosts_is_named(cluster, launcher, keys, message):
    given = {k: v for k, v in cluster.keys(**keys).items() if v is not None}
    with pytest.raises(ConfigError, match=message):
        launcher.start(workers=2, **given)


@pytest.mark.parametrize("how", ["open", "other content", "folder", "fifo", "none"])
def test_a_key_file_that_is_not_safe_is_refused(tmp_path, how):
    path = tmp_path / "key"
    if how == "open":
        key_file.write(path)
        path.chmod(0o640)
    elif how == "other content":
        path.touch(0o600)
        path.write_text('{"leader": {"public": "x", "secret": "y"}, "follower": []}')
    elif how == "folder":
        path.mkdir()
    elif how == "fifo":
        os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match="key file"):
        key_file.read(path)


def test_the_keys_come_back_and_show_in_no_repr(tmp_path):
    made = key_file.write(tmp_path / "key")
    assert key_file.read(tmp_path / "key") == made
    assert made.leader.secret not in repr(made)
    assert isinstance(made.follower, KeyPair)
    with pytest.raises(FileExistsError):
        key_file.write(tmp_path / "key")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("protocol", 99, "the protocol of this handshake is 2 at the leader, 99 at there"),
        ("core", "9.9", "the version of hardpoint is 0.1.0 at the leader, 9.9 at there"),
        ("api", "1.0", "the contract API is"),
        ("plugins", {}, "plugin platform cpu is hardpoint-cpu 1 at the leader, not installed at"),
        ("plugins", {"platform cpu": "hardpoint-cpu 2"}, "is hardpoint-cpu 1 at the leader, hard"),
        ("settings", {"dtype": "'x'"}, "the key dtype is 'auto' at the leader, 'x' at there"),
        ("settings", {}, ""),
    ],
)
def test_what_differs_is_named_with_both_values(field, value, said):
    cpu = ResolvedPlugin(kind="platform", name="cpu", distribution="hardpoint-cpu", version="1",
                         entry_point="x")  # fmt: skip
    leader = installation([cpu], [("dtype", "auto"), ("plugins.mp.leader", "a:1")])
    follower = handshake.Installation.heard(evolve(leader, **{field: value}).told())
    found = difference(leader, follower, "there")
    assert said in found
    assert bool(found) == bool(said)
    assert difference(leader, evolve(leader, plugins={**leader.plugins, "x y": "z 1"}), "x") == ""


def test_ranks_are_split_in_order_and_the_first_host_has_more():
    assert handshake.split(3, 2) == (range(2), range(2, 3))
    assert handshake.split(8, 3) == (range(3), range(3, 6), range(6, 8))


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


def test_the_doctor_tells_what_would_listen(cluster):
    sets = [part for key, value in cluster.keys().items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-P", "-c", COMMAND, "doctor", "--executor", "mp"]
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


@pytest.mark.parametrize("change", ["other", "none", "the same"])
def test_a_host_whose_model_has_other_files_is_refused(tmp_path, change):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    model = handshake.Model(path, "safetensors", fingerprint(path, "safetensors"))
    if change == "other":
        (path / "config.json").write_text("[]")
    elif change == "none":
        (path / "config.json").unlink()
        path.rmdir()
    keys, own = key_file.JoinKeys.make(), installation([], [])
    hosts = Hosts(NoNursery(), keys, (LEADER, 0), handshake.split(2, 2), own, heartbeat=0.1,
                  model=model, bounds=Bounds())  # fmt: skip
    follower = Follower((LEADER, int(hosts.address.rpartition(":")[2])), keys, own, node_rank=None,
                        address=OTHER, peer_timeout=30.0, start="plain")  # fmt: skip
    try:
        if change == "the same":
            follower.join(30.0)
            assert follower.ranks == [1]
        else:
            with pytest.raises(ExecutorFailedError) as caught:
                follower.join(30.0)
            said = str(caught.value)
            if change == "other":
                assert "the model's file config.json is 2 bytes, " in said
                assert said.count("2 bytes, ") == 2
            else:
                assert "has not the leader's model" in said
                assert str(path) in said
    finally:
        follower.close()
        hosts.close(0.0)


class NoNursery:
    """What the leader's side needs of a nursery while nothing is started."""

    pid = exit = None
    output = None

    def __init__(self):
        self.loop = self
        self.told = []

    def listen(self, heard, died):
        self.heard = heard

    def call(self, function):
        self.told.append(function)

    def close(self, within):
        pass


def test_a_follower_that_talks_nonsense_has_no_effect(eventually):
    keys = key_file.JoinKeys.make()
    own = installation([], [("dtype", "auto")])
    nursery = NoNursery()
    hosts = Hosts(nursery, keys, (LEADER, 0), handshake.split(3, 3), own, heartbeat=0.1,
                  bounds=Bounds())  # fmt: skip
    codec = codec_across()
    host, port = LEADER, int(hosts.address.rpartition(":")[2])

    def follower(node_rank=None):
        return Follower((host, port), keys, own, node_rank=node_rank, address=OTHER,
                        peer_timeout=30.0, start="plain")  # fmt: skip

    mad, sane = follower(), follower(2)
    hello = {"op": "hello", "installation": own.told(), "node_rank": None, "address": "x",
             "host": "mad"}  # fmt: skip
    said = [
        b"", b"\x80\x04N.", os.urandom(500), b"\xc1" * 9, b"\x91" * 3000,
        *(bytes(codec.encode(each, "it").data) for each in (
            None, [], {}, {"op": None}, {"op": "started", "rank": 0}, {"op": "exited"},
            hello | {"node_rank": "one"},
            hello | {"node_rank": 0}, hello | {"node_rank": -1}, hello | {"node_rank": 99},
            hello | {"installation": {}}, hello | {"installation": own.told() | {"plugins": 3}},
            {"op": "leaving", "why": "x"}, {"op": "lines", "rank": 1, "data": b"x" * 1000},
        )),
    ]  # fmt: skip
    for data in said:
        mad._socket.send(data)
    mad._socket.send_multipart([b"two", b"frames"])
    sane.join(30.0)
    assert sane.ranks == [2]
    for _ in range(3):  # what it said of its place was understood
        assert mad._link.comes(30.0)
        assert mad._next()["op"] == "refused"
    mad.join(30.0)
    assert mad.ranks == [1]
    for rank in (2, "x", 1):  # of another's worker, of none, and at last of its own
        mad._put({"op": "exited", "rank": rank, "pid": 7})
    mad._put({"op": "lines"})
    hosts.await_followers(30.0, "key")

    def passed_on():
        return [call.args[0] for call in nursery.told if isinstance(call.args[0], dict)]

    eventually(lambda: any(each["rank"] == 1 for each in passed_on()))
    assert [each["rank"] for each in passed_on()] == [1]
    mad.close(), sane.close()
    hosts.close(0.0)
