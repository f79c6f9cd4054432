"""The platforms of GPUs side by side on a machine without one: they are listed with the reason, and
asked by name they give it at once; none touches another, and no variable is set for workers.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from attrs import evolve
from hardpoint.config.schema import Config, GraphConfig, ParallelConfig
from hardpoint.errors import ConfigError, UnsupportedError
from hardpoint.records import WorkerContext
from hardpoint.references import resolve, resolve_class
from hardpoint.registry import Registry
from hardpoint.worker import Worker
from hardpoint_external_launcher.executor import ExternalLauncherExecutor
from hardpoint_runtime.accelerator.surroundings import torch_build

NAMES = ("cuda", "rocm", "xpu")
BUILDS = {"cuda": "cuda", "rocm": "hip", "xpu": "xpu"}
REASONS = {
    "cuda": "is not built for CUDA",
    "rocm": "is not built for ROCm",
    "xpu": "is not built for XPU",
}
LIBRARIES = {"cuda": {"pynvml"}, "rocm": {"amdsmi"}, "xpu": set()}
MASKS = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
}
HERE = torch_build()
ROOT = Path(__file__).resolve().parents[2]


def without(name):
    return pytest.param(
        name, marks=pytest.mark.skipif(bool(HERE.get(BUILDS[name])), reason="torch is built for it")
    )


ABSENT = [without(name) for name in NAMES]


def run(code, *arguments):
    """Run a program; return its exit code, what it printed last as JSON, and its complaints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    last = done.stdout.splitlines()[-1:]
    return done.returncode, json.loads(last[0]) if last else None, done.stderr


LISTED = """
import json, sys
from hardpoint.cli import main
main(["plugins", "--json"])
"""


def test_each_is_listed_as_unavailable_with_its_reason():
    done = subprocess.run(
        [sys.executable, "-m", "hardpoint", "plugins", "--json"], capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    rows = {row["name"]: row for row in json.loads(done.stdout)["plugins"]}
    for name in NAMES:
        row = rows[name]
        assert (row["state"], row["reason"]) == ("loaded", "")
        if not HERE.get(BUILDS[name]):
            assert row["available"] is False
            assert REASONS[name] in row["verdict"]


NAMED = """
import json, sys
from hardpoint.cli import main
try:
    main(["generate", "--platform", sys.argv[1], "hello"])
except SystemExit as end:
    code = end.code
heavy = {"torch", "numpy", "hardpoint_cpu", "hardpoint_uniproc", "hardpoint_multiproc"}
print(json.dumps([code, sorted(heavy & set(sys.modules))]))
"""


@pytest.mark.parametrize("name", ABSENT)
def test_asked_for_by_name_it_gives_the_reason_at_once_and_nothing_computes(name):
    _, (code, heavy), told = run(NAMED, name)
    assert code == 2
    assert f"platform {name!r} was asked for and is not usable here" in told
    assert REASONS[name] in told
    assert heavy == []


PROBED = """
import json, sys
from hardpoint.config.loading import load_config
from hardpoint.registry import Registry
registry = Registry.discover(load_config(environ={}))
registry.verdict("platform", sys.argv[1], named=True)
tops = {name.partition(".")[0] for name in sys.modules}
print(json.dumps(sorted(tops)))
"""


@pytest.mark.parametrize("name", NAMES)
def test_a_probe_imports_no_other_platform_and_nothing_heavy(name):
    _, tops, _ = run(PROBED, name)
    ours = {top for top in tops if top.startswith("hardpoint_")}
    assert ours == {f"hardpoint_{name}", "hardpoint_runtime"}
    libraries = set().union(*LIBRARIES.values()) - LIBRARIES[name]
    assert not {*libraries, "torch", "numpy", "triton"} & set(tops)


# Ranks and devices.


def worker_of(name, local_rank, devices=()):
    platform = resolve(f"hardpoint_{name}.platform:{name.capitalize()}Platform")()
    context = WorkerContext(
        config=Config(), rank=5, local_rank=local_rank, world_size=8, devices=devices
    )
    return resolve_class(platform.worker_class, Worker)(context, platform, Registry([]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mask", [None, "", "3,1", "GPU-8a6f1c9e-0003,GPU-8a6f1c9e-0001"])
def test_local_rank_i_takes_logical_device_i_under_any_mask(monkeypatch, name, mask):
    for variable in MASKS[name]:
        monkeypatch.delenv(variable, raising=False)
    if mask is not None:
        monkeypatch.setenv(MASKS[name][0], mask)
    before = dict(os.environ)
    for local_rank in (0, 1, 5):
        worker = worker_of(name, local_rank)
        assert worker.device_index == local_rank
        assert worker.torch_device == ("xpu" if name == "xpu" else "cuda")
    assert worker_of(name, 0, devices=("2",)).device_index == 2
    assert dict(os.environ) == before


VARIABLES = tuple(dict.fromkeys(name for names in MASKS.values() for name in names))


def place(worker):
    """Return the rank, the device and the masks of a worker. Runs in it."""
    import os

    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
    masks = {name: os.environ[name] for name in names if name in os.environ}
    return worker.rank, worker.device.index, masks


@pytest.mark.parametrize(
    "name", ["cuda", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rocm", "xpu"))]
)
def test_workers_have_the_masks_of_their_parent_and_devices_by_rank(monkeypatch, name):
    from hardpoint_engine import LLM

    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(MASKS[name][0], "3,1")
    before = dict(os.environ)
    with LLM(
        load_format="dummy", platform=name, executor="mp", tensor_parallel_size=2, max_model_len=64,
        num_kv_blocks=8, plugins={name: {"substitute": "host", "substitute_devices": 2}},
    ) as llm:  # fmt: skip
        found = llm.collective_rpc(place)
        assert dict(os.environ) == before
    masks = {MASKS[name][0]: "3,1"}
    assert found == [(0, 0, masks), (1, 1, masks)]


@pytest.mark.parametrize("name", NAMES)
def test_no_variable_is_declared_for_workers(name):
    platform = resolve(f"hardpoint_{name}.platform:{name.capitalize()}Platform")()
    config = evolve(Config())
    assert platform.environment(config, platform.placement(config)) == {}


@pytest.mark.parametrize(
    ("name", "mode", "has"),
    [
        ("cuda", None, True),
        ("cuda", "none", False),
        ("rocm", None, False),
        ("rocm", "full", True),
        ("rocm", "none", False),
    ],
)
def test_buffers_of_graphs_are_not_registered_over_memory_that_sleeps(name, mode, has):
    platform = platform_of(name)
    parallel = ParallelConfig(tensor_parallel_size=2)
    config = evolve(Config(), parallel=parallel, graph=GraphConfig(graph_mode=mode))
    found = platform.environment(config, platform.placement(config))
    assert found == ({"NCCL_GRAPH_REGISTER": "0"} if has else {})


@pytest.mark.parametrize(("name", "mode"), [("cuda", None), ("rocm", "full")])
def test_a_launcher_that_left_it_out_is_told_what_to_set(monkeypatch, name, mode):
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    platform = platform_of(name)
    config = evolve(
        Config(),
        parallel=ParallelConfig(tensor_parallel_size=2),
        graph=GraphConfig(graph_mode=mode),
    )
    started = SimpleNamespace(
        config=config, platform=platform, placement=platform.placement(config),
        registry=Registry([]), world_size=2,
    )  # fmt: skip
    seat = SimpleNamespace(world_size=2, rank=1)
    with pytest.raises(ConfigError, match=r"rank 1 needs NCCL_GRAPH_REGISTER='0'.*launcher set"):
        ExternalLauncherExecutor._check(started, seat)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    ExternalLauncherExecutor._check(started, seat)


# What the platforms share, by name.


def platform_of(name, **settings):
    kind = name.capitalize()
    made = resolve(f"hardpoint_{name}.settings:{kind}Settings")(**settings)
    return resolve(f"hardpoint_{name}.platform:{kind}Platform")(made)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "call", [lambda w: w.sleep(1), lambda w: w.wake_up(["weights"]), lambda w: w.discard(["x"])]
)
def test_without_sleep_nothing_lies_in_pools_and_sleep_says_why(name, call):
    port = resolve(f"hardpoint_{name}.device:{name.capitalize()}DeviceOps")
    assert port("xpu" if name == "xpu" else "cuda", 0, sleeps=False).pools is None
    platform = platform_of(name, substitute="host", sleep="off")
    context = WorkerContext(config=Config(), rank=0, local_rank=0, world_size=1)
    worker = resolve_class(platform.worker_class, Worker)(context, platform, Registry([]))
    no_graphs = SimpleNamespace(graph_plan=SimpleNamespace(graphs=set()))
    worker.device, worker.model_runner = worker.make_device(), no_graphs
    assert worker.port.pools is None
    with pytest.raises(UnsupportedError, match=rf"plugins\.{name}\.sleep is off.*to auto"):
        call(worker)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("sleep", "sleeps"), [("auto", True), ("off", False)])
def test_the_key_decides_whether_the_devices_memory_sleeps(name, sleep, sleeps, monkeypatch):
    import torch

    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    platform = platform_of(name, sleep=sleep)
    context = WorkerContext(config=Config(), rank=0, local_rank=0, world_size=1)
    worker = resolve_class(platform.worker_class, Worker)(context, platform, Registry([]))
    assert worker.make_device().sleeps is sleeps


@pytest.mark.parametrize(
    ("tensor", "mode", "default", "told"),
    [
        (1, None, "full_and_piecewise", False),
        (2, None, "none", True),
        (2, "full", "none", False),
    ],
)
def test_on_rocm_graphs_that_hold_collectives_are_for_those_who_ask(
    tensor, mode, default, told, caplog
):
    config = evolve(
        Config(),
        parallel=ParallelConfig(tensor_parallel_size=tensor),
        graph=GraphConfig(graph_mode=mode),
    )
    platform = platform_of("rocm")
    context = WorkerContext(config=config, rank=0, local_rank=0, world_size=tensor)
    with caplog.at_level(logging.INFO, "hardpoint.worker"):
        worker = resolve_class(platform.worker_class, Worker)(context, platform, Registry([]))
        assert worker.make_device().default_graph_mode == default
    assert ("graph_mode is none: with tensor_parallel_size above 1" in caplog.text) is told


@pytest.mark.parametrize("folder", ["runtime", *(f"plugins/{name}" for name in NAMES)])
def test_torch_is_one_whose_streams_are_contexts(folder):
    """Since 2.7."""
    declared = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
    (torch,) = (each for each in declared["project"]["dependencies"] if each.startswith("torch"))
    numbers = re.fullmatch(r"torch>=(\d+)\.(\d+)", torch)
    assert tuple(map(int, numbers.groups())) >= (2, 7)
