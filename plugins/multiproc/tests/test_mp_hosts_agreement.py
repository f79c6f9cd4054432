"""What leader and follower must have in common: keys, versions, settings, model."""

from __future__ import annotations

import os
import time

import pytest
from attrs import evolve
from hardpoint.checkpoints.fingerprint import fingerprint
from hardpoint.errors import (
    ConfigError,
    ExecutorFailedError,
    StartTimeoutError,
)
from hardpoint.metadata import ResolvedPlugin
from hardpoint.rpc.network import key_file
from hardpoint.rpc.network.bounds import Bounds
from hardpoint.rpc.network.keys import KeyPair
from hardpoint_multiproc.hosts import handshake
from hardpoint_multiproc.hosts.follower import Follower, LeaderLostError
from hardpoint_multiproc.hosts.handshake import difference, installation
from hardpoint_multiproc.hosts.leader import Hosts

LEADER, OTHER = "127.0.0.2", "127.0.0.3"


class Nursery:
    """What the leader's side needs of a nursery while nothing is started."""

    pid = exit = output = None

    def __init__(self):
        self.loop = self

    def listen(self, heard, died):
        pass

    def call(self, function):
        """A follower that leaves first, while its leader ends, is lost: nobody here has to know."""

    def close(self, within):
        pass


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
    hosts = Hosts(Nursery(), keys, (LEADER, 0), handshake.split(2, 2), own, heartbeat=0.1,
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


def test_other_keys_are_told_on_both_sides(caplog):
    own = installation([], [])
    hosts = Hosts(Nursery(), key_file.JoinKeys.make(), (LEADER, 0), handshake.split(2, 2), own,
                  heartbeat=0.1, bounds=Bounds())  # fmt: skip
    follower = Follower((LEADER, int(hosts.address.rpartition(":")[2])), key_file.JoinKeys.make(),
                        own, node_rank=None, address=OTHER, peer_timeout=30.0,
                        start="plain")  # fmt: skip
    try:
        with pytest.raises(LeaderLostError, match="or has other keys than this follower's --key-f"):
            follower.join(60.0)
        until = time.monotonic() + 60.0
        while not hosts._door.strangers:
            assert time.monotonic() < until
            time.sleep(0.01)
        with pytest.raises(StartTimeoutError, match="node 1 has not joined"):
            hosts.await_followers(0.0, "key")
    finally:
        follower.close()
        hosts.close(0.0)
    assert any("came with other keys than this group's" in each for each in caplog.messages)
