"""Actors on two nodes: the driver's by shared memory, the others by the network."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from attrs import evolve
from hardpoint.errors import ConfigError, WorkerDiedError, WorkerHungError

SPREAD = {"plugins.ray.strategy": "SPREAD"}


@pytest.fixture
def spread(launcher, nodes):
    """Start three workers on two nodes."""
    return lambda **keys: launcher.start(
        workers=3, **{"plugins.ray.address": nodes.address, **SPREAD, **keys}
    )


def seats_of(executor):
    actors = executor._resources.nursery._actors
    return [actors[rank] for rank in sorted(actors)]


def test_the_driver_s_node_has_the_first_ranks_and_all_answer_in_rank_order(spread):
    executor = spread()
    actors = seats_of(executor)
    assert actors[0].pidfd >= 0
    here = [rank for rank, each in enumerate(actors) if each.pidfd >= 0]
    assert 0 < len(here) < 3
    assert here == list(range(len(here)))
    assert len({each.where.node_id for each in actors}) == 2
    assert executor.collective_rpc("supported_tasks") == [("generate", "embed")] * 3
    assert [each.rank for each in executor.check_health()] == [0, 1, 2]
    futures = [executor.collective_rpc("supported_tasks", non_block=True) for _ in range(20)]
    assert len([future.result(60) for future in futures]) == 20


def test_a_killed_actor_of_another_node_is_told_with_its_cause(spread):
    from ray.exceptions import RayActorError

    executor = spread()
    victim = seats_of(executor)[-1]
    assert victim.pidfd == -1
    future = executor.collective_rpc("supported_tasks", non_block=True)
    future.result(60)
    os.kill(victim.where.pid, signal.SIGKILL)
    error = failure_of(executor)
    assert isinstance(error, WorkerDiedError)
    assert (error.rank, error.pid) == (2, victim.where.pid)
    assert isinstance(error.__cause__, RayActorError)


def test_declared_variables_reach_other_nodes_and_none_replaces_a_node_s_own(
    spread, monkeypatch, caplog
):
    from hardpoint_ray.node_environment import variables_on_nodes
    from hardpoint_ray.placement import Seat

    executor = spread()
    far = seats_of(executor)[-1].seat
    seats = [Seat(rank=0, local_rank=0, bundle=far.bundle, node_id=far.node_id)]
    monkeypatch.setenv("RAY_TEST_FORWARDED", "yes")
    monkeypatch.setenv("RAY_TEST_TOKEN", "secret")
    declared = [{"RAY_TEST_DECLARED": "1", "RAY_TEST_OF_NODE": "the driver's"}]
    sent = variables_on_nodes(declared, seats, ["RAY_TEST_FORWARDED", "RAY_TEST_TOKEN"])
    assert sent == [{"RAY_TEST_DECLARED": "1", "RAY_TEST_FORWARDED": "yes"}]
    assert "RAY_TEST_OF_NODE = 'its own' of this host is kept" in caplog.text
    assert "RAY_TEST_TOKEN is not sent to other nodes" in caplog.text


def test_workers_have_what_was_declared_for_them_and_no_more(spread, monkeypatch):
    """Case B16, of workers themselves."""
    import psutil
    from hardpoint_dummy.platform import DummyPlatform

    declared = {"RAY_TEST_DECLARED": "1", "RAY_TEST_OF_NODE": "the driver's"}
    monkeypatch.setattr(DummyPlatform, "environment", lambda *_: declared)
    for name in ("RAY_TEST_FORWARDED", "RAY_TEST_TOKEN", "RAY_TEST_DRIVER_ONLY"):
        monkeypatch.setenv(name, "of the driver")
    executor = spread(forward_env=("RAY_TEST_FORWARDED", "RAY_TEST_TOKEN"))
    here, *_, there = [
        {name: value for name, value in found.items() if name.startswith("RAY_TEST_")}
        for found in (psutil.Process(each.where.pid).environ() for each in seats_of(executor))
    ]
    assert here == declared
    assert there == {
        "RAY_TEST_DECLARED": "1",
        "RAY_TEST_FORWARDED": "of the driver",
        "RAY_TEST_OF_NODE": "its own",
    }


@pytest.fixture
def folder(launcher, tmp_path, monkeypatch):
    """The files of a model, as the driver describes it to all that are started."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(bytes(2 << 20))
    prepare = launcher.prepare

    def prepared(**keys):
        executor_class, config, *parts = prepare(**keys)
        described = evolve(config.description, path=path, format="safetensors")
        return executor_class, evolve(config, description=described), *parts

    monkeypatch.setattr(launcher, "prepare", prepared)
    return path


def test_a_node_with_other_files_of_the_model_is_refused(spread, folder, monkeypatch):
    import ray
    from hardpoint_ray import model_files

    look = model_files.fingerprint

    def looked(path, model_format):
        """Look as the driver does; what another node finds afterwards is another file."""
        found = look(path, model_format)
        (folder / "model.safetensors").write_bytes(bytes(2 << 20) + b"other")
        return found

    monkeypatch.setattr(model_files, "fingerprint", looked)
    with pytest.raises(ConfigError) as caught:
        spread()
    (problem,) = caught.value.problems
    assert problem.key == "model"
    assert re.search(
        r"file model\.safetensors is 2097152 bytes, [0-9a-f]{16} on the driver's node, "
        r"and 2097157 bytes, [0-9a-f]{16} on node [0-9a-f]{8} \([\d.]+\)",
        problem.message,
    )
    monkeypatch.undo()
    assert not ray.is_initialized()


@pytest.mark.slow
def test_a_node_without_the_model_is_refused(spread, folder, monkeypatch):
    from hardpoint_ray import model_files

    ours = model_files.fingerprint(folder, "safetensors")
    monkeypatch.setattr(model_files, "fingerprint", lambda *_: ours)
    (folder / "model.safetensors").unlink()
    (folder / "config.json").unlink()
    folder.rmdir()
    with pytest.raises(ConfigError, match=r"has not the driver's model: .*model"):
        spread()


@pytest.mark.slow
def test_with_the_same_files_workers_start_on_both_nodes(spread, folder):
    assert len(spread().check_health()) == 3


def failure_of(executor):
    heard = []
    executor.register_failure_callback(heard.append)
    end = time.monotonic() + 60
    while not heard and time.monotonic() < end:
        time.sleep(0.01)
    return heard[0]


@pytest.mark.slow
def test_the_stack_of_a_stuck_worker_of_another_node_is_told(spread):
    with pytest.raises(WorkerHungError) as caught:
        spread(**{"plugins.ray.hang_after": 2.0, "plugins.dummy.fail_at": "load@2=hang"})
    assert caught.value.rank == 2
    assert "hardpoint_dummy" in str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))


@pytest.mark.slow
def test_what_a_worker_of_another_node_writes_is_shown_at_once_with_its_name(
    spread, capfd, eventually
):
    executor = spread()
    with Path(f"/proc/{seats_of(executor)[2].where.pid}/fd/2").open("a") as error_stream:
        error_stream.write("hello from afar\n")
    said = []

    def shown():
        captured = capfd.readouterr()
        said.append(captured.out + captured.err)
        lines = re.sub(r"\x1b\[\d+m", "", "".join(said)).splitlines()
        return [line for line in lines if "hello from afar" in line]

    (line,) = eventually(shown)
    assert re.match(r"\(Worker_2 pid=\d+", line)
    assert len(executor.check_health()) == 3  # it works on


def test_a_shutdown_ends_the_workers_of_every_node(spread, is_alive, eventually):
    executor = spread()
    pids = [each.where.pid for each in seats_of(executor)]
    executor.shutdown()
    eventually(lambda: not any(map(is_alive, pids)))


@pytest.mark.slow
def test_a_new_group_begins_on_the_driver_s_node_whichever_is_fuller(launcher, nodes):
    """Case B18. Whichever node Ray likes better by how full it is, one of both is not that one."""
    import ray
    from hardpoint_ray.placement import NODE_LABEL

    key = {"plugins.ray.address": nodes.address}
    first = launcher.start(workers=1, **key)
    here = seats_of(first)[0].where.node_id
    assert here == ray.get_runtime_context().get_node_id()
    (other,) = {each["NodeID"] for each in ray.nodes() if each["Alive"]} - {here}
    for fuller in (here, other):
        filled = ray.util.placement_group(
            [{"dummy": 2}], bundle_label_selector=[{NODE_LABEL: fuller}]
        )
        assert filled.wait(60)
        executor = launcher.start(workers=1, **key)
        assert [each.where.node_id for each in seats_of(executor)] == [here]
        executor.shutdown()
        ray.util.remove_placement_group(filled)


def test_a_removed_node_fails_the_group(spread, nodes):
    """Last in this file: there is one node less then."""
    executor = spread()
    far = [rank for rank, each in enumerate(seats_of(executor)) if each.pidfd == -1]
    assert nodes.remove() == "removed"
    error = failure_of(executor)
    assert isinstance(error, WorkerDiedError)
    assert error.rank in far
    assert error.__cause__ is not None
