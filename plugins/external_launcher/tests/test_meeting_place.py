"""The store where ranks meet: at its address alone, told by the doctor, deaf to strangers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from array import array
from types import SimpleNamespace

import pytest
import torch.distributed
from attrs import evolve
from hardpoint.config.loading import load_config
from hardpoint.errors import ConfigError, ExecutorFailedError, PluginError, StartTimeoutError
from hardpoint.messages import (
    CachedRequestData,
    ModelRunnerOutput,
    SchedulerOutput,
    StepTimings,
)
from hardpoint.records import Placement
from hardpoint.rpc.network.key_file import JoinKeys
from hardpoint.rpc.network.listening import listening
from hardpoint.worker_calls import DivergedError
from hardpoint_external_launcher.agreement import (
    check_digests,
    check_identities,
    digest,
    digests,
    identity,
    outcome,
)
from hardpoint_external_launcher.launchers import Seat
from hardpoint_external_launcher.lines import born_at
from hardpoint_external_launcher.listeners import of_ranks
from hardpoint_external_launcher.places import HostPlace, KeyedPlace, LauncherPlace
from hardpoint_external_launcher.presence import Presence
from hardpoint_external_launcher.settings import ExternalLauncherSettings
from hardpoint_external_launcher.store import Store


def seat(**more):
    given = {"launcher": "srun", "rank": 0, "world_size": 2, "local_rank": 0, **more}
    return Seat(**given)


def gather(place, who, left=0.2):
    """Have a rank meet the others; ``left`` are the seconds to its deadline."""
    with contextlib.closing(Store(place, time.monotonic() + left, 0.2)) as store:
        return store.gather(who)


def keyed(**more):
    return KeyedPlace(seat(**more), JoinKeys.make(), 10.0)


def test_rank_0_listens_at_the_address_that_is_named_and_at_no_other():
    with socket.create_server(("127.0.0.3", 0)) as free:
        port = free.getsockname()[1]
    place = keyed(address="127.0.0.3", port=port)
    place.serve()
    try:
        assert ("127.0.0.3", port) in listening(os.getpid())
        assert all(other != port for host, other in listening(os.getpid()) if host != "127.0.0.3")
        way = place.reach(1.0)
        way.set("a", "b")
        assert way.get("a") == b"b"
    finally:
        place.close()
    assert ("127.0.0.3", port) not in listening(os.getpid())


def own(rank=0):
    return Presence(rank=rank, pid=os.getpid(), born=born_at(os.getpid()), host="h", offers={},
                    memory=-1, board=-1, seed=5, identity={})  # fmt: skip


def test_a_port_that_is_taken_and_an_address_of_no_host_are_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"MASTER_PORT = '{port}': rank 0 cannot listen"):
            gather(keyed(address="127.0.0.1", port=port), own())
    for place in (keyed, lambda **more: HostPlace(seat(**more))):
        with pytest.raises(ConfigError, match=r"MASTER_ADDR = '192\.0\.2\.1': rank 0 cannot"):
            gather(place(address="192.0.2.1", port=29500), own())


def test_ranks_of_another_host_than_rank_0s_are_told_of_the_key_file():
    place = HostPlace(seat(rank=1, address="192.0.2.1", port=29500))
    with pytest.raises(ConfigError, match=r"key_file.*192\.0\.2\.1 is no address of this host"):
        gather(place, own(1))


@pytest.mark.parametrize("kind", [keyed, lambda **more: HostPlace(seat(**more))])
def test_a_name_that_means_every_interface_is_refused(kind):
    """Of numbers the launcher's variables tell already."""
    with pytest.raises(ConfigError, match=r"MASTER_ADDR = '0 = 0\.0\.0\.0': is no address of one"):
        gather(kind(address="0", port=29500), own())


def test_ranks_that_are_all_there_are_not_too_late():
    """However long the machine took."""
    agent = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent.set("hardpoint//1/1", own(1).text())
    place = LauncherPlace(seat(address="127.0.0.1", port=agent.port, hosts_store=True))
    assert gather(place, own(), -1.0) == [own(), own(1)]
    with pytest.raises(StartTimeoutError, match="rank 1: not come"):  # with its next engine
        gather(place, own(), -1.0)


KINDS = {
    "host": HostPlace,
    "keyed": lambda given: KeyedPlace(given, JoinKeys.make(), 1.0),
    "launcher's": LauncherPlace,
}


@pytest.mark.parametrize("kind", KINDS)
def test_who_does_not_come_is_named(kind):
    place = KINDS[kind](seat(rank=1, address="127.0.0.1", port=9, local_size=2))
    with pytest.raises(StartTimeoutError, match=r"rank 0: not come to 127\.0\.0\.1:9") as caught:
        gather(place, own(1))
    assert "plugins.external_launcher.start_timeout" in str(caught.value)
    assert "key_file" in str(caught.value)
    assert "rank 1:" not in str(caught.value)


def test_who_is_awaited_is_said_now_and_then(monkeypatch, caplog):
    monkeypatch.setattr("hardpoint_external_launcher.store.FIRST_WORD", 0.0)
    place = HostPlace(seat(rank=1, address="127.0.0.1", port=9, local_size=2))
    with pytest.raises(StartTimeoutError):
        gather(place, own(1))
    assert "waiting at 127.0.0.1:9 for ranks [0], for 0 s so far" in caplog.text
    assert "ranks of several hosts need plugins.external_launcher.key_file" in caplog.text


def test_a_launchers_store_that_strangers_block_ends_the_ranks_by_their_deadline():
    """As torchrun's does, which answers nobody while enough of them are silent."""
    with socket.create_server(("127.0.0.1", 0)) as blocked:
        place = LauncherPlace(seat(address="127.0.0.1", port=blocked.getsockname()[1]))
        with pytest.raises(StartTimeoutError, match="rank 1: not come to"):
            gather(place, own(), 0.2)


@pytest.mark.parametrize(
    "text",
    [b"", b"\x80\x04.", b"[]", b"null", b'{"offers": 1}', b'{"offers": {}, "rank": "x"}'],
)
def test_what_strangers_write_into_the_store_is_an_error_and_nothing_else(text):
    with pytest.raises(ExecutorFailedError, match="what stands in the store for rank 1"):
        Presence.of(1, text)


def test_a_presence_is_its_own_ranks_alone():
    whole = Presence(
        rank=2, pid=1, born=2, host="h", offers={0: 3}, memory=-1, board=-1, seed=5, identity={}
    )
    assert Presence.of(2, whole.text().encode()) == whole
    with pytest.raises(ExecutorFailedError, match="rank 2 stands in the store as rank 1"):
        Presence.of(1, whole.text().encode())


def test_a_sealed_presence_is_read_by_who_has_the_same_secret_alone():
    whole = Presence(
        rank=2, pid=1, born=2, host="h", offers={0: 3}, memory=-1, board=-1, seed=5, identity={},
        door={"address": "tcp://h:1", "key": "k"}, name="node",
    )  # fmt: skip
    sealed = whole.text(b"secret")
    assert Presence.of(2, sealed.encode(), b"secret") == whole
    forged = sealed.replace("tcp://h:1", "tcp://h:2")
    for text, secret in ((forged, b"secret"), (whole.text(), b"secret"), (sealed, b"other")):
        with pytest.raises(ExecutorFailedError, match="rank 2 is not sealed"):
            Presence.of(2, text.encode(), secret)
    with pytest.raises(ExecutorFailedError, match="is not its presence"):
        Presence.of(2, sealed.encode())


def listeners(workers, environ, **settings):
    platform = SimpleNamespace(placement=lambda config: Placement(num_workers=workers))
    config = SimpleNamespace(settings_of=lambda name: ExternalLauncherSettings(**settings))
    return [(each.purpose, each.address) for each in of_ranks(config, platform, environ)]


def test_the_doctor_tells_of_the_store():
    by_hand = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    place = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
    agent = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert listeners(1, {}) == []
    here = ("rendezvous store", "a Unix socket without a file")
    for environ in ({}, {**by_hand, **place}, {**by_hand, **place, **agent}):
        assert listeners(2, environ) == [here, ("collectives", "127.0.0.1:*")]
    given = {"key_file": "k", "address": "10.0.0.8"}
    assert listeners(2, {}, **given)[0] == ("rendezvous store", "MASTER_ADDR:MASTER_PORT")
    assert listeners(2, agent, **given)[0] == ("rendezvous store", "*:MASTER_PORT")
    served = listeners(2, {**by_hand, **place, **agent}, **given)
    assert served[0] == ("rendezvous store", "*:29500")
    own_store, ranks, collectives = listeners(2, {**by_hand, **place}, **given)
    assert own_store == ("rendezvous store", "10.0.0.7:29500")
    assert ranks == ("ranks of other hosts", "10.0.0.8:*")
    assert collectives == ("collectives", "10.0.0.8:*")


# What ranks must have in common.


def test_the_first_difference_is_named_with_both_values_and_ranks():
    alike = {"hardpoint": "1", "plugin cpu": "hardpoint-cpu 1", "block_size": "4"}
    check_identities({0: alike, 1: dict(alike), 2: dict(alike)})
    with pytest.raises(ConfigError, match="block_size is 4 on rank 0 and 8 on rank 2") as caught:
        check_identities({0: alike, 1: alike, 2: {**alike, "block_size": "8"}})
    assert caught.value.problems[0].key == "block_size"
    with pytest.raises(PluginError, match="plugin cpu is hardpoint-cpu 1 on rank 0 and unset on"):
        check_identities({0: alike, 1: {"hardpoint": "1", "block_size": "4"}})


def test_ranks_whose_model_has_other_files_are_refused_by_the_file(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    description = SimpleNamespace(path=tmp_path, format="safetensors")
    config = evolve(load_config(overrides={"model": "m"}, environ={}), description=description)
    registry = SimpleNamespace(resolved=list)
    told = {0: identity(config, registry)}
    assert told[0]["the model's file config.json"].startswith("2 bytes, ")
    (tmp_path / "config.json").write_text("[]")
    told[1] = identity(config, registry)
    with pytest.raises(ConfigError, match=r"the model's file config\.json is 2 bytes") as caught:
        check_identities(told)
    assert "on rank 0 and 2 bytes" in str(caught.value)
    assert "the same model" in str(caught.value.problems[0])


@pytest.mark.parametrize("other", [2, None])
def test_ranks_with_other_seeds_are_refused_by_the_key(other):
    """Case B8: also where only one of them has any."""
    registry = SimpleNamespace(resolved=list)
    told = {}
    for rank, seed in enumerate((1, other)):
        given = {"model": "m"} if seed is None else {"model": "m", "seed": seed}
        told[rank] = identity(load_config(overrides=given, environ={}), registry)
    with pytest.raises(ConfigError, match=f"seed is 1 on rank 0 and {other} on rank 1") as caught:
        check_identities(told)
    assert [problem.key for problem in caught.value.problems] == ["seed"]


def test_a_digest_is_of_content_alone():
    assert digest(frozenset({"a", "b", "c"})) == digest({"c", "b", "a"})
    assert digest((1, 2)) == digest([1, 2])
    assert digest({"a": 1}) != digest({"a": 2})
    assert digest(((1,), 2)) != digest((1, (2,)))
    assert digest("1") != digest(1)
    assert len(digest(SchedulerOutput(step_id=1))) == 16


class Plain:
    def __init__(self, value):
        self.value = value


def test_a_digest_is_of_arrays_and_plain_objects_too():
    """Whatever a plugin puts into a plan."""
    assert digest(array("i", [1, 2])) == digest(array("i", [1, 2]))
    assert digest(array("i", [1, 2])) != digest(array("i", [1, 3]))
    assert digest(array("i", [0])) != digest(array("f", [0]))
    assert digest(Plain(1)) == digest(Plain(1))
    assert digest(Plain(1)) != digest(Plain(2))


def test_what_workers_chose_tells_by_its_fields():
    """Not their timings, which always differ."""
    outputs = {rank: ModelRunnerOutput(step_id=1, req_ids=("a",), tokens=((7 + rank,),))
               for rank in (0, 1)}  # fmt: skip
    told = {rank: outcome("execute_model", output) for rank, output in outputs.items()}
    with pytest.raises(DivergedError, match=r"ModelRunnerOutput\.tokens on rank 1"):
        check_digests(7, told)
    timed = evolve(outputs[0], timings=StepTimings())
    check_digests(7, {0: told[0], 1: outcome("execute_model", timed)})
    assert outcome("execute_model", None) == {}
    of_first_stage = evolve(outputs[0], tokens=((),))
    assert outcome("execute_model", of_first_stage) == {}, "the last one chooses"


FIELDS = [
    ("num_tokens", {"a": 1}),
    ("finished", frozenset({"x"})),
    ("running", CachedRequestData(req_ids=("a",), new_blocks=(None,), num_computed=(3,))),
    ("defer_sampling", True),
    ("blocks_to_zero", (4,)),
]


@pytest.mark.parametrize(("name", "value"), FIELDS)
def test_each_field_of_a_plan_tells(name, value):
    plans = {0: SchedulerOutput(step_id=3), 1: SchedulerOutput(step_id=3, **{name: value})}
    told = {rank: digests("execute_model", (plan,)) for rank, plan in plans.items()}
    check_digests(7, {0: told[0], 1: json.loads(json.dumps(told[0]))})
    with pytest.raises(DivergedError, match=f"call 7 .*SchedulerOutput.{name} on rank 1"):
        check_digests(7, told)
