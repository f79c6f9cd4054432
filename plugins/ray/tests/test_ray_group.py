"""Actors as workers on one node: calls, death, output, end."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest
from hardpoint.config.loading import load_config
from hardpoint.errors import ConfigError, ExecutorFailedError, RemoteError, WorkerDiedError
from hardpoint.messages import SchedulerOutput

pytestmark = pytest.mark.usefixtures("session")
PATIENCE = 60.0


def place_of(worker):
    import ray

    context = ray.get_runtime_context()
    return worker.rank, os.getpid(), context.get_actor_id(), context.get_assigned_resources()


def test_each_worker_is_an_actor_that_has_a_bundle_of_its_own(launcher):
    executor = launcher.start(workers=3)
    places = executor.collective_rpc(place_of)
    assert [rank for rank, *_ in places] == [0, 1, 2]
    assert len({pid for _, pid, *_ in places} | {os.getpid()}) == 4
    assert len({actor for *_, actor, _ in places}) == 3
    assert [each["dummy"] for *_, each in places] == [1.0] * 3


def test_workers_yield_to_nobody_that_the_driver_does_not(launcher):
    executor = launcher.start()
    assert executor.collective_rpc(yielding) == [os.nice(0)] * 2


def yielding(worker):
    return os.nice(0)


def test_calls_do_not_go_through_ray(launcher, monkeypatch):
    from ray.actor import ActorMethod

    executor = launcher.start()
    calls = []
    submit = ActorMethod._remote
    monkeypatch.setattr(
        ActorMethod, "_remote", lambda *args, **keys: (calls.append(args), submit(*args, **keys))[1]
    )
    assert executor.collective_rpc(pid_of_worker) != []
    assert executor.check_health()
    assert calls == []


def pid_of_worker(worker):
    return os.getpid()


def fail(worker):
    raise KeyError(worker.rank)


def test_an_error_names_the_rank_and_leaves_the_group_alive(launcher, pids):
    executor = launcher.start()
    with pytest.raises(RemoteError) as caught:
        executor.collective_rpc(fail)
    assert isinstance(caught.value.__cause__, KeyError)
    assert len(pids(executor)) == 2


def sleep(worker, seconds):
    time.sleep(seconds)


def test_a_killed_actor_fails_pending_calls_with_the_cause_that_ray_tells(launcher, pids):
    from ray.exceptions import ActorDiedError

    executor = launcher.start()
    workers = pids(executor)
    futures = [executor.collective_rpc(sleep, args=(1000,), non_block=True) for _ in range(3)]
    os.kill(workers[1], signal.SIGKILL)
    errors = [future.exception(60) for future in futures]
    assert errors == [errors[0]] * 3
    assert isinstance(errors[0], WorkerDiedError)
    assert (errors[0].rank, errors[0].pid) == (1, workers[1])
    assert isinstance(errors[0].__cause__, ActorDiedError)
    with pytest.raises(ExecutorFailedError, match="the executor has failed: worker rank 1"):
        executor.collective_rpc("supported_tasks")


def speak(worker):
    print(f"hello from rank {worker.rank}")
    print(f"trouble of rank {worker.rank}", file=sys.stderr)


def test_what_a_worker_prints_reaches_the_driver_with_its_name(launcher, capfd, eventually):
    executor = launcher.start()
    executor.collective_rpc(speak)
    said = []

    def both():
        said.append(capfd.readouterr().err)
        lines = "".join(said).splitlines()
        return [line for line in lines if "of rank" in line or "from rank" in line][3:]

    eventually(both)
    for words in ("hello from rank", "trouble of rank"):
        lines = [line for line in "".join(said).splitlines() if words in line]
        assert {line.split(" pid=")[0] for line in lines} == {"(Worker_0", "(Worker_1"}


def child_of(worker):
    import subprocess

    return subprocess.Popen(["sleep", "1000"]).pid


def test_a_shutdown_leaves_no_process_and_gives_the_bundles_back(launcher, pids, is_alive):
    import ray

    before = ray.available_resources().get("dummy")
    executor = launcher.start()
    left = [*pids(executor), *executor.collective_rpc(child_of)]
    executor.shutdown()
    assert [pid for pid in left if is_alive(pid)] == []
    for _ in range(600):
        if ray.available_resources().get("dummy") == before:
            break
        time.sleep(0.05)
    assert ray.available_resources().get("dummy") == before


def test_a_worker_that_cannot_be_built_raises_its_own_error(launcher):
    with pytest.raises(RemoteError, match="injected fault"):
        launcher.start(**{"plugins.dummy.fail_at": "build@1"})


def test_a_node_with_another_core_is_refused_before_any_worker_starts(launcher, monkeypatch):
    from hardpoint_ray import actors

    monkeypatch.setattr(actors, "hardpoint", SimpleNamespace(__version__="0.0.7"))
    with pytest.raises(ExecutorFailedError, match=r"rank 0 has .* driver 0\.0\.7: install"):
        launcher.start()


def test_the_token_is_in_no_environment_and_in_no_command(session):
    import psutil
    from hardpoint_ray.own_ray import token

    seen = 0
    for process in psutil.process_iter():
        try:
            text = " ".join([*process.cmdline(), *process.environ().values()])
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        seen += "ray" in text
        assert token() not in text
    assert seen


def test_nobody_else_enters_the_folder_of_a_ray_that_was_started_here(session):
    folder = session.connection.folder
    modes = {each: each.stat().st_mode & 0o777 for each in (folder, folder / "token")}
    assert modes == {folder: 0o700, folder / "token": 0o600}
    assert any((folder / "r").iterdir())  # which Ray has made one for everybody


def test_ray_listens_on_this_host_alone_and_where_it_is_told(session):
    import psutil
    from hardpoint.rpc.network.listening import listening
    from hardpoint_ray.listeners import of_ray
    from hardpoint_ray.settings import RaySettings

    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = {process: listening(process.pid) for process in family}
    assert {host for places in found.values() for host, _ in places} <= {"127.0.0.1", "::1"}
    told = {each.owner for each in of_ray(RaySettings(address="local"), 1)}
    owners = {owner_of(process) for process, places in found.items() if places}
    assert {"gcs_server", "raylet", "each of its processes"} <= owners <= told


def owner_of(process):
    """Return who a process is to the doctor."""
    command = " ".join(process.cmdline())
    if process.name() in ("gcs_server", "raylet"):
        return process.name()
    if "runtime_env/agent" in command:
        return "runtime environment agent"
    if process.pid == os.getpid() or "default_worker.py" in command or command.startswith("ray::"):
        return "each of its processes"
    return command


def test_steps_are_counted_in_ray_s_metrics_where_that_is_asked_for(monkeypatch):
    from hardpoint_engine import LLM, SamplingParams
    from hardpoint_ray.metrics import StepMetrics

    seen = []
    count = StepMetrics.step
    monkeypatch.setattr(
        StepMetrics, "step", lambda *args: (seen.append(args[1].total_tokens), count(*args))
    )
    keys = {"model": "dummy", "load_format": "dummy", "platform": "dummy", "executor": "ray"}
    config = load_config(
        overrides={**keys, "plugins.ray.metrics": True, "plugins.dummy.num_workers": 2}, environ={}
    )
    with LLM.from_config(config) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert sum(seen) == 5


def answer(executor, workers):
    """Return the tokens that the dummy platform answers, and how many steps a graph has taken."""
    from hardpoint_engine import LLM, SamplingParams

    keys = {"model": "dummy", "load_format": "dummy", "platform": "dummy", "executor": executor}
    config = load_config(
        overrides={**keys, "seed": 3, "plugins.dummy.num_workers": workers}, environ={}
    )
    sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with LLM.from_config(config) as llm:
        (result,) = llm.generate([[1, 2, 3]], sampling)
        graph = getattr(llm.executor, "graph", None)
        everybody = llm.executor.collective_rpc(
            "execute_model", args=(SchedulerOutput(step_id=10**6),), timeout=PATIENCE
        )
        assert [each.step_id for each in everybody] == [10**6] * workers
        return list(result.outputs[0].token_ids), 0 if graph is None else graph.steps


def test_steps_by_a_graph_give_the_tokens_of_one_worker():
    expected, _ = answer("uni", 1)
    assert len(expected) == 3
    found, steps = answer("ray_legacy", 2)
    assert found == expected
    assert steps >= 3


def test_resources_that_never_come_free_are_told_with_a_table(launcher, monkeypatch, caplog):
    import ray
    from hardpoint_ray import placement

    monkeypatch.setattr(placement, "FIRST_LINE", 0.5)
    with pytest.raises(placement.PlacementError) as caught:
        launcher.start(workers=9, **{"plugins.ray.placement_timeout": 2.0})
    assert "plugins.ray.placement_timeout = 2 s" in str(caught.value)
    asked = "9 workers, each 1 dummy (plugins.ray.strategy = 'PACK'); free of all:"
    assert asked in str(caught.value)
    assert "of 8 dummy" in str(caught.value)
    waiting = [line for line in caplog.messages if "waiting for Ray to place the workers" in line]
    assert 1 <= len(waiting) <= 2
    states = [each["state"] for each in ray.util.placement_group_table().values()]
    assert set(states) <= {"REMOVED"}


def test_a_given_group_is_used_as_the_indices_say_and_outlives_the_executor(launcher):
    import ray

    group = ray.util.placement_group([{"dummy": 2}, {"CPU": 1}, {"dummy": 1}], name="given")
    assert group.wait(60)
    keys = {"plugins.ray.placement_group": "given"}
    executor = launcher.start(**keys, **{"plugins.ray.bundle_indices": (2, 0)})
    actors = executor._resources.nursery._actors
    assert [actors[rank].seat.bundle for rank in (0, 1)] == [2, 0]
    executor.shutdown()
    assert ray.util.placement_group_table(group)["state"] == "CREATED"
    with pytest.raises(ExecutorFailedError, match=r"bundles \[1\] cannot hold a worker"):
        launcher.start(**keys, **{"plugins.ray.bundle_indices": (0, 1)})
    with pytest.raises(ExecutorFailedError, match="3 workers need as many bundles"):
        launcher.start(workers=3, **keys)
    ray.util.remove_placement_group(group)
    with pytest.raises(ExecutorFailedError, match="Ray has no such placement group"):
        launcher.start(**{"plugins.ray.placement_group": "absent"})


def test_bundles_without_a_group_are_refused(launcher):
    with pytest.raises(ConfigError, match=r"plugins.ray.bundle_indices.*there is none"):
        launcher.start(**{"plugins.ray.bundle_indices": (0, 1)})


def test_another_address_than_that_of_the_ray_in_use_is_refused(launcher):
    import ray

    address = ray.get_runtime_context().gcs_address
    with pytest.raises(ConfigError, match=f"connected to the Ray at {address}"):
        launcher.start(**{"plugins.ray.address": "127.0.0.1:1"})
    port = address.rpartition(":")[2]
    executor = launcher.start(**{"plugins.ray.address": f"localhost:{port}"})
    assert len(executor.check_health()) == 2


@pytest.mark.slow
def test_bundles_that_another_fills_are_not_awaited_for_ever(launcher, monkeypatch, caplog):
    import ray
    from hardpoint_ray import placement

    monkeypatch.setattr(placement, "FIRST_LINE", 0.5)
    group = ray.util.placement_group([{"dummy": 1}, {"dummy": 1}], name="filled")
    assert group.wait(60)
    first = launcher.start(**{"plugins.ray.placement_group": "filled"})
    keys = {"plugins.ray.placement_group": "filled", "plugins.ray.placement_timeout": 2.0}
    with pytest.raises(placement.PlacementError, match=r"2 workers, each 1 dummy") as caught:
        launcher.start(**keys)
    assert "did not start the workers' actors in their bundles within" in str(caught.value)
    assert "0 of 2 are there" in str(caught.value)
    assert any("waiting for Ray to start the workers' actors" in each for each in caplog.messages)
    assert len(first.check_health()) == 2
    first.shutdown()
    assert len(launcher.start(**keys | {"plugins.ray.placement_timeout": 60.0}).check_health()) == 2
    launcher.close()
    ray.util.remove_placement_group(group)


def group_and_bundles(made):
    """Start two workers where this runs; return their group and bundles, and end them."""
    executor = made.start()
    actors = executor._resources.nursery._actors
    reservation = executor._resources.nursery._reservation
    found = reservation.group.id.hex(), [actors[rank].seat.bundle for rank in (0, 1)]
    own = reservation.own
    executor.shutdown()
    return *found, own


@pytest.mark.slow
def test_the_group_that_the_driver_runs_in_is_used_and_outlives_the_executor(launcher):
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.placement_group([{"dummy": 1}, {"CPU": 1}, {"dummy": 1}])
    assert group.wait(60)
    inside = PlacementGroupSchedulingStrategy(
        placement_group=group,
        placement_group_bundle_index=1,
        placement_group_capture_child_tasks=True,
    )
    driver = ray.remote(num_cpus=1, scheduling_strategy=inside)(group_and_bundles)
    used, bundles, own = ray.get(driver.remote(launcher), timeout=120)
    assert used == group.id.hex()
    assert bundles == [0, 2]
    assert not own
    assert ray.util.placement_group_table(group)["state"] == "CREATED"
    ray.util.remove_placement_group(group)
