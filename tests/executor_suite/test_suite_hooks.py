"""Hooks around the whole house, in the order in which they fire, on each executor (case A9)."""

from __future__ import annotations

import json
import os
import sys

import pytest
from hardpoint.config.loading import load_config
from hardpoint.sampling_params import SamplingParams
from hardpoint_engine.build import start_engine
from hardpoint_engine.request import EngineRequest

OBSERVER = """
import json, os, threading
from pathlib import Path
from hardpoint.hookspecs import hookimpl
from hardpoint.records import Change, ExtensionRecord

here = Path(__file__).parent
fired = os.open(here / "fired", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

def note(*what):
    in_driver = (here / "driver").read_text() == str(os.getpid())
    in_driver = in_driver and threading.current_thread() is threading.main_thread()
    who = "driver" if in_driver else "worker"
    os.write(fired, (json.dumps([who, *what]) + "\\n").encode())

note("imported", os.getpid())

@hookimpl
def hardpoint_extension():
    return ExtensionRecord(name="observer", api=(2, 0))

@hookimpl
def hardpoint_configure(config):
    note("configure", config.description is not None, config.scheduler.max_num_seqs)
    return [Change(key="max_num_seqs", old=None, new=3, reason="for the test")]

@hookimpl
def hardpoint_worker_env(config, rank):
    note("worker_env", rank, config.scheduler.max_num_seqs)

@hookimpl
def hardpoint_worker_methods():
    return {"added": lambda worker, number, more=0: (worker.rank, number + more)}

@hookimpl
def hardpoint_worker_started(worker):
    note("worker_started", worker.rank)

@hookimpl
def hardpoint_model_loaded(worker):
    note("model_loaded", worker.rank)

@hookimpl
def hardpoint_step_started(scheduler_output, rank):
    note("step_started", rank, scheduler_output.step_id)

@hookimpl
def hardpoint_step_finished(scheduler_output, output, rank):
    note("step_finished", rank, scheduler_output.step_id, output is not None)

@hookimpl
def hardpoint_worker_closing(worker):
    note("worker_closing", worker.rank)
"""


@pytest.fixture
def fired(tmp_path, monkeypatch):
    """An installed observer; what it heard, in order."""
    info = tmp_path / "hp_observer-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hp-observer\nVersion: 1.0\n\n")
    (info / "entry_points.txt").write_text("[hardpoint.extensions]\nobserver = hp_observer\n")
    (tmp_path / "hp_observer.py").write_text(OBSERVER)
    (tmp_path / "driver").write_text(str(os.getpid()))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda: [
        tuple(json.loads(line)) for line in (tmp_path / "fired").read_text().splitlines()
    ]
    if (module := sys.modules.pop("hp_observer", None)) is not None:
        os.close(module.fired)


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_fire_in_order_in_the_driver_and_in_every_worker(flavour, fired, fails):
    overrides = {
        "model": "dummy",
        "load_format": "dummy",
        "platform": "dummy",
        "executor": flavour.executor,
        "plugins.dummy.num_workers": flavour.world_size,
        "plugins.dummy.fail_at": "step" if fails else "",
        **flavour.keys,
    }
    core = start_engine(load_config(overrides=overrides, environ={}))
    try:
        sampling = SamplingParams(temperature=0, max_tokens=4)
        core.add_request(EngineRequest(req_id="a", prompt=(1,), sampling=sampling, arrival=0.0))
        core.step()
        # Every rank is done with the step then.
        added = core.executor.collective_rpc("added", args=(1,), kwargs={"more": 2})
    finally:
        core.shutdown()
    heard = [what for what in fired() if what[1] != "imported"]
    ranks = range(flavour.world_size)
    assert added == [(rank, 3) for rank in ranks]
    by_rank = [[what[1:] for what in heard if what[0] == "worker" and what[2] == r] for r in ranks]
    step = by_rank[0][2][2]
    for rank in ranks:
        own = [("worker_env", rank, 3)] if flavour.launched and rank else []
        assert by_rank[rank] == [
            *own,
            ("worker_started", rank),
            ("model_loaded", rank),
            ("step_started", rank, step),
            ("step_finished", rank, step, not fails),
            ("worker_closing", rank),
        ]
    assert [what[1:] for what in heard if what[0] == "driver"] == [
        ("configure", True, None),
        *(("worker_env", rank, 3) for rank in flavour.ranks_asked_for),
        ("step_started", None, step),
        ("step_finished", None, step, not fails),
    ]
    names = [what[1:3] for what in heard]
    assert names.index(("step_started", None)) < names.index(("step_started", 0))
    if not fails:  # the first rank's error ends the step in the driver, whoever is still at it
        assert names.index(("step_finished", 0)) < names.index(("step_finished", None))


def test_a_plugin_is_loaded_exactly_once_in_every_process(flavour, fired):
    """Case A4: in the driver and in every worker, and in no other process."""
    overrides = {
        "model": "dummy",
        "load_format": "dummy",
        "platform": "dummy",
        "executor": flavour.executor,
        "plugins.dummy.num_workers": flavour.world_size,
        **flavour.keys,
    }
    core = start_engine(load_config(overrides=overrides, environ={}))
    try:
        pids = {os.getpid(), *core.executor.collective_rpc(pid_of)}
    finally:
        core.shutdown()
    imports = [what[2] for what in fired() if what[1] == "imported"]
    assert sorted(imports) == sorted(pids)
    assert len(pids) == flavour.num_processes


def pid_of(worker):
    return os.getpid()
