"""How workers come to be: nursery and plain, what each is given, and a start that fails (cases B4,
B20, B23; rows E3, E3b; flaw 6).
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from hardpoint.errors import (
    ConfigError,
    ExecutorFailedError,
    RemoteError,
    StartTimeoutError,
    WorkerDiedError,
)
from hardpoint.executor import SHUTDOWN_TIMEOUT
from hardpoint.records import ForkSafety
from hardpoint_dummy.faults import DummyFault
from hardpoint_multiproc.nursery_process import NurseryProcess
from hardpoint_multiproc.plugin import probe

START = ["nursery", "plain"]


def about(worker):
    from pathlib import Path

    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "group": os.getpgrp(),
        "session": os.getsid(0),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "title": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode(),
        "name": Path("/proc/self/comm").read_text().strip(),
        "stdin": str(Path("/proc/self/fd/0").readlink()),
        "environ": dict(os.environ),
        "argv": sys.argv,
        "path": list(sys.path),
        "cwd": str(Path.cwd()),
        "cores": sorted(os.sched_getaffinity(0)),
        "main": threading.current_thread() is threading.main_thread(),
        "files": sorted(
            str(link.readlink()).split(":")[0]
            for link in Path("/proc/self/fd").iterdir()
            if link.is_symlink()
        ),
    }


@pytest.mark.parametrize("start", START)
def test_a_worker_is_a_process_like_any_other(launcher, start):
    executor = launcher.start(workers=3, **{"plugins.mp.start": start})
    told = executor.collective_rpc(about)
    for each in told:
        assert each["group"] == each["pid"]
        assert each["parent"] == told[0]["parent"] != os.getpid()
        assert each["session"] == os.getsid(0)
        assert each["threads"] == ["MainThread", "hardpoint-control"]
        assert each["main"]
        assert each["stdin"] == "/dev/null"
        assert each["argv"] == sys.argv
        assert each["path"] == sys.path
        assert each["cwd"] == str(Path.cwd())
    nursery = told[0]["parent"]
    assert psutil.Process(nursery).ppid() == os.getpid()
    assert os.getpgid(nursery) == nursery != os.getpgrp()


@pytest.mark.parametrize("start", START)
def test_a_worker_has_the_drivers_variables_and_its_own_alone(launcher, monkeypatch, start):
    monkeypatch.setenv("OF_THE_DRIVER", "yes")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    executor = launcher.built(**{"plugins.mp.start": start})
    executor.platform.environment = lambda config, placement: {"OF_THE_PLATFORM": "1"}
    executor.start_workers()
    executor.collective_rpc("init_device")
    for each in executor.collective_rpc(about):
        expected = {**os.environ, "OF_THE_PLATFORM": "1"}
        assert each["environ"] == expected


def numbers(worker):
    import random
    import uuid

    import numpy as np

    return random.random(), str(uuid.uuid4()), float(np.random.random())


def test_forked_workers_draw_different_numbers(launcher):
    executor = launcher.built(workers=3)
    executor.platform.preload = ("numpy.random",)
    executor.start_workers()
    drawn = executor.collective_rpc(numbers)
    for values in zip(*drawn, strict=True):
        assert len(set(values)) == 3


@pytest.mark.parametrize("start", START)
def test_nothing_of_the_nursery_or_of_a_sibling_is_open_in_a_worker(launcher, start):
    executor = launcher.start(workers=3, **{"plugins.mp.start": start})
    first, *others = [each["files"] for each in executor.collective_rpc(about)]
    assert others == [first, first]
    assert first.count("socket") == 1  # its own control lane
    assert first.count("pipe") == 2  # its output, twice
    assert not any("pidfd" in name for name in first)


@pytest.mark.parametrize("start", START)
def test_ctrl_c_is_the_drivers_alone(launcher, start):
    executor = launcher.start(**{"plugins.mp.start": start})
    told = executor.collective_rpc(about)
    for pid in (told[0]["parent"], *(each["pid"] for each in told)):
        os.kill(pid, signal.SIGINT)
    assert executor.collective_rpc(lambda worker: os.getpid()) == [each["pid"] for each in told]
    assert executor.collective_rpc(lambda worker: signal.getsignal(signal.SIGINT)) == [
        signal.SIG_IGN
    ] * len(told)


def test_titles_name_the_place_in_every_dimension(launcher, capfd):
    executor = launcher.start(workers=None, tensor_parallel_size=2, pipeline_parallel_size=2)
    titles = ["Worker_PP0_TP0", "Worker_PP0_TP1", "Worker_PP1_TP0", "Worker_PP1_TP1"]
    told = executor.collective_rpc(about)
    assert [each["title"] for each in told] == titles
    assert [each["name"] for each in told] == titles
    executor.collective_rpc(lambda worker: print(f"I am {worker.rank}"))
    executor.shutdown()
    error = capfd.readouterr().err
    for rank, each in enumerate(told):
        assert f"({titles[rank]} pid={each['pid']}) I am {rank}\n" in error


def test_the_users_script_is_not_run_again_and_needs_no_guard(drivers):
    driver = drivers("shutdown")
    said = [driver.line() for _ in range(4)]
    assert [list(each) for each in said] == [
        ["script"],
        ["starting"],
        ["workers", "nursery"],
        ["closed"],
    ]
    assert driver.ended() == (0, "")


@pytest.mark.parametrize("start", START)
def test_what_lies_in_the_current_folder_passes_for_no_library(drivers, tmp_path, start):
    for name in ("json", "signal", "hardpoint", "attrs", "socket"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    driver = drivers("shutdown", f"plugins.mp.start={start}", cwd=tmp_path)
    for _ in range(4):
        driver.line()
    assert driver.ended() == (0, "")


@pytest.mark.parametrize("start", START)
def test_signals_that_the_driver_blocks_or_ignores_are_its_own_affair(drivers, start):
    driver = drivers("deafened", f"plugins.mp.start={start}")
    for _ in range(3):
        driver.line()
    assert driver.line() == {"masks": [[], []]}
    driver.line()
    assert driver.ended() == (0, "")


def test_a_program_that_does_not_know_its_interpreter_is_told_so(launcher, monkeypatch):
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(ExecutorFailedError, match=r"sys.executable is empty.*executor = 'uni'"):
        launcher.start()


def test_another_system_is_told_of_by_the_probe(monkeypatch):
    assert probe().available
    monkeypatch.setattr(sys, "platform", "darwin")
    verdict = probe()
    assert not verdict.available
    assert "this is darwin" in verdict.reason


# Which way.


def test_a_platform_that_is_initialised_here_gets_plain_workers_and_the_reason(launcher, caplog):
    for reason in ("its runtime is initialised here", "this process was forked from one that is"):
        executor = launcher.built()
        executor.platform.fork_safe = lambda reason=reason: ForkSafety(safe=False, reason=reason)
        with caplog.at_level(logging.WARNING, logger="hardpoint"):
            executor.start_workers()
        assert (
            f"workers start by way of plain: the platform cannot be forked: {reason}" in caplog.text
        )
        assert _plain(executor)
        executor.shutdown()


@pytest.mark.parametrize(
    "name", ["LD_PRELOAD", "SOME_VISIBLE_DEVICES", "MALLOC_ARENA_MAX", "PYTORCH_ANY_ALLOC_CONF"]
)
def test_variables_that_are_read_early_get_plain_workers(launcher, caplog, name):
    executor = launcher.built()
    executor.platform.environment = lambda config, placement: {name: ""}
    with caplog.at_level(logging.WARNING, logger="hardpoint"):
        executor.start_workers()
    assert f"plain: workers need {name} set before they start" in caplog.text
    assert _plain(executor)
    assert [each["environ"][name] for each in executor.collective_rpc(about)] == ["", ""]


def test_a_nursery_that_was_asked_for_and_cannot_be_is_an_error(launcher):
    executor = launcher.built(**{"plugins.mp.start": "nursery"})
    executor.platform.fork_safe = lambda: ForkSafety(safe=False, reason="so it is")
    with pytest.raises(ConfigError, match=r"plugins.mp.start = 'nursery' .*so it is.*plain"):
        executor.start_workers()


def test_a_nursery_with_a_second_thread_starts_plain_workers(
    launcher, tmp_path, monkeypatch, caplog
):
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    executor = launcher.built()
    executor.platform.preload = ("starts_a_thread",)
    with caplog.at_level(logging.WARNING, logger="hardpoint"):
        executor.start_workers()
    assert (
        "worker rank 0 is started plain: the nursery cannot be forked, it has 2 threads"
        in caplog.text
    )
    assert _plain(executor)
    strict = launcher.built(**{"plugins.mp.start": "nursery"})
    strict.platform.preload = ("starts_a_thread",)
    with pytest.raises(ExecutorFailedError, match="it has 2 threads"):
        strict.start_workers()


def test_a_module_that_cannot_be_preloaded_starts_plain_workers(launcher, caplog):
    executor = launcher.built()
    executor.platform.preload = ("absent_module",)
    with caplog.at_level(logging.WARNING, logger="hardpoint"):
        executor.start_workers()
    assert "No module named 'absent_module'" in caplog.text
    assert _plain(executor)


def _plain(executor):
    names = executor.collective_rpc(lambda worker: "json" in sys.modules and len(sys.orig_argv))
    commands = executor.collective_rpc(lambda worker: sys.orig_argv)
    return bool(names) and all("worker_entry" in " ".join(each) for each in commands)


def test_torch_is_preloaded_without_threads_and_workers_can_raise_them(launcher):
    pytest.importorskip("torch")
    executor = launcher.built(**{"plugins.mp.start": "nursery"})
    executor.platform.preload = ("torch",)
    executor.start_workers()

    def multiply(worker):
        preloaded = "torch" in sys.modules
        import torch

        torch.set_num_threads(2)
        a = torch.ones(600, 600)
        return preloaded, float((a @ a).sum()), torch.get_num_threads()

    assert executor.collective_rpc(multiply, timeout=60) == [(True, 600.0**3, 2)] * 2


@pytest.mark.parametrize("asked", ["", "3"])
def test_a_forked_worker_has_the_threads_that_it_would_have_started_itself(
    launcher, monkeypatch, asked
):
    pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    executor = launcher.built(**{"plugins.mp.start": "nursery", "plugins.mp.bind": False})
    executor.platform.preload = ("torch",)
    executor.start_workers()
    threads = int(asked or len(os.sched_getaffinity(0)))
    told = executor.collective_rpc(lambda worker: sys.modules["torch"].get_num_threads())
    assert told == [threads] * 2


# Early boot.


def test_the_nursery_begins_before_the_description_is_read_and_is_used(launcher, monkeypatch):
    executor_class, config, registry, platform = launcher.prepare()
    prepared = executor_class.prepare(config, registry, platform)
    assert isinstance(prepared, NurseryProcess)
    executor = executor_class.start(config, registry, platform, prepared)
    launcher.started.append(executor)
    parents = executor.collective_rpc(lambda worker: os.getppid())
    assert parents == [prepared.pid] * 2


def test_the_engine_has_the_nursery_begin_while_it_reads_the_description(launcher, monkeypatch):
    from hardpoint_engine import build

    executor_class = launcher.prepare()[0]
    order, begun = [], []
    prepare, read = executor_class.prepare, build.read_description

    def begin(*args):
        order.append("begin")
        begun.append(prepare(*args))
        return begun[-1]

    def note(*args):
        order.append("read")
        return read(*args)

    monkeypatch.setattr(executor_class, "prepare", begin)
    monkeypatch.setattr(build, "read_description", note)
    core = build.start_engine(launcher.configured())
    try:
        parents = core.executor.collective_rpc(lambda worker: os.getppid())
    finally:
        core.shutdown()
    assert order == ["begin", "read"]
    assert parents == [begun[0].pid] * 2


def test_what_was_begun_early_is_given_back_unused(launcher, is_alive, eventually):
    executor_class, config, registry, platform = launcher.prepare()
    prepared = executor_class.prepare(config, registry, platform)
    eventually(lambda: prepared.pid)
    pid = prepared.pid
    prepared.close()
    prepared.close()
    assert not is_alive(pid)
    dropped = [executor_class.prepare(config, registry, platform)]
    eventually(lambda: dropped[0].pid)
    pid = dropped.pop().pid
    eventually(lambda: not is_alive(pid))
    for plain in ({"plugins.mp.start": "plain"},):
        _, config, registry, platform = launcher.prepare(**plain)
        assert executor_class.prepare(config, registry, platform) is None


def test_a_nursery_closed_at_once_leaves_nothing(is_alive):
    before = set(psutil.Process().children())
    for _ in range(20):
        NurseryProcess(()).close()
    assert set(psutil.Process().children()) == before


def test_workers_outlive_the_thread_that_started_them(launcher, pids):
    """What ends with its parent ends with the thread that forked it."""
    started = []
    thread = threading.Thread(target=lambda: started.append(launcher.start()))
    thread.start()
    thread.join()
    assert pids(started[0]) == pids(started[0])
    assert len(started[0].check_health()) == 2


def test_the_nursery_loads_no_vendors_backend_and_starts_one_thread(launcher):
    executor = launcher.start()
    told = executor.collective_rpc(about)
    nursery = psutil.Process(told[0]["parent"])
    environ = nursery.environ()
    assert environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    assert environ["OMP_NUM_THREADS"] == environ["OPENBLAS_NUM_THREADS"] == "1"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in told[0]["environ"]
    assert nursery.num_threads() == 1


# A start that fails.


@pytest.mark.parametrize("start", START)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_worker_that_cannot_be_built_tells_why_and_the_others_are_gone(
    launcher, start, rank, capfd
):
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(RemoteError) as caught:
        launcher.start(
            workers=3,
            **{"plugins.mp.start": start, "plugins.dummy.fail_at": f"build@{rank}"},
        )
    error = caught.value
    assert error.rank == rank
    assert error.type_name == "hardpoint_dummy.faults.DummyFault"
    assert type(error.__cause__) is DummyFault
    assert "in __init__" in error.remote_traceback
    assert set(psutil.Process().children(recursive=True)) == before


@pytest.mark.parametrize("start", START)
@pytest.mark.parametrize("point", ["build", "init_device", "load"])
def test_a_worker_that_dies_while_it_starts_is_named(launcher, start, point):
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(WorkerDiedError) as caught:
        launcher.start(**{"plugins.mp.start": start, "plugins.dummy.fail_at": f"{point}@1=exit"})
    assert (caught.value.rank, caught.value.exit) == (1, 7)
    assert set(psutil.Process().children(recursive=True)) == before


BROKEN = """
from hardpoint.hookspecs import hookimpl
from hardpoint.records import ExtensionRecord
import os, pathlib, sys

if str(os.getpid()) != pathlib.Path(__file__).with_name("driver").read_text():
    print("the last words", file=sys.stderr)
    {what}

@hookimpl
def hardpoint_extension():
    return ExtensionRecord(name="broken", api=(2, 0))
"""


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Install an extension that does something bad wherever it is not in the driver."""

    def install(what):
        info = tmp_path / "hp_broken-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hp-broken\nVersion: 1.0\n\n")
        (info / "entry_points.txt").write_text("[hardpoint.extensions]\nbroken = hp_broken\n")
        (tmp_path / "hp_broken.py").write_text(BROKEN.format(what=what))
        (tmp_path / "driver").write_text(str(os.getpid()))
        monkeypatch.syspath_prepend(str(tmp_path))

    yield install
    sys.modules.pop("hp_broken", None)


TOGETHER = """
    import time
    here = pathlib.Path(__file__).with_name("here")
    here.mkdir(exist_ok=True)
    (here / str(os.getpid())).touch()
    end = time.monotonic() + 60
    while len(list(here.iterdir())) < 3:
        assert time.monotonic() < end, "the others are not there"
        time.sleep(0.002)
"""


@pytest.mark.parametrize("start", START)
def test_workers_start_side_by_side(launcher, broken, pids, tmp_path, start):
    """Each waits for the others before it is half there."""
    broken(TOGETHER.strip())
    executor = launcher.start(workers=3, **{"plugins.mp.start": start})
    assert {path.name for path in (tmp_path / "here").iterdir()} == set(map(str, pids(executor)))


@pytest.mark.parametrize("start", START)
def test_a_failing_start_has_the_last_lines(launcher, broken, start):
    broken("os._exit(3)")
    with pytest.raises(WorkerDiedError) as caught:
        launcher.start(**{"plugins.mp.start": start})
    assert caught.value.exit == 3
    assert "the last words" in caught.value.last_lines


@pytest.mark.parametrize("start", START)
def test_a_plugin_that_breaks_in_workers_alone_is_the_cause(launcher, broken, start):
    broken("raise ValueError('not here')")
    with pytest.raises(RemoteError, match="not here") as caught:
        launcher.start(**{"plugins.mp.start": start})
    assert any("the last words" in note for note in caught.value.__notes__)


def test_a_start_without_progress_ends_and_says_where_each_rank_stands(launcher, broken):
    broken("import time; time.sleep(1000)")
    began = time.monotonic()
    with pytest.raises(StartTimeoutError, match="rank 0: plugins, rank 1: plugins") as caught:
        launcher.start(**{"plugins.mp.start_timeout": 1.0, "rpc.heartbeat": 0.05})
    assert set(caught.value.stages) == {0, 1}
    assert "raise plugins.mp.start_timeout" in str(caught.value)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("point", ["init_device", "load"])
def test_a_worker_that_hangs_while_it_loads_ends_the_start(launcher, point):
    began = time.monotonic()
    keys = {"plugins.mp.start_timeout": 1.0, "rpc.heartbeat": 0.05}
    with pytest.raises(StartTimeoutError, match="rank 1: ") as caught:
        launcher.start(**keys, **{"plugins.dummy.fail_at": f"{point}@1=hang"})
    assert set(caught.value.stages) == {1}
    assert "raise plugins.mp.start_timeout" in str(caught.value)
    assert time.monotonic() - began < 20


def test_a_load_that_takes_long_and_works_is_waited_for(launcher):
    def work(worker):
        def load():
            end = time.monotonic() + 2.5
            while time.monotonic() < end:
                pass
            return loaded()

        loaded, worker.load_model = worker.load_model, load

    keys = {"plugins.mp.start_timeout": 1.0, "rpc.heartbeat": 0.05}
    executor = launcher.built(**keys)
    executor.start_workers()
    executor.collective_rpc("init_device")
    executor.collective_rpc(work)
    assert len(executor.collective_rpc("load_model")) == 2


# Interrupted (case B23).


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("nth", range(10))
def test_a_signal_at_any_point_of_the_start_leaves_nothing(drivers, eventually, signum, nth):
    after = random.SystemRandom().uniform(0, 0.02 * 1.5**nth)  # 0.02 to 0.8 s
    driver = drivers("idle", f"plugins.mp.start={START[nth % 2]}", "plugins.dummy.load_seconds=1")
    driver.line(), driver.line()
    time.sleep(after)  # a moment of the start, not a synchronisation
    driver.kill(signum)
    began = time.monotonic()
    code, _ = driver.ended()
    assert code in (-signum, 130, 1), f"{after} s after the begin"
    eventually(lambda: driver.family() == [], 10)
    assert time.monotonic() - began < SHUTDOWN_TIMEOUT, f"{after} s after the begin"


def test_an_interrupt_in_the_middle_of_a_start_leaves_nothing_in_a_driver_that_goes_on(drivers):
    script = Path(__file__).with_name("mp_interrupted.py")
    driver = drivers(*map(str, (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.6)), script=script)
    told = driver.line()
    assert told["interrupted"] >= 6  # a later one may find the start done
    assert (told["children"], told["threads"], told["descriptors"]) == ([], [], [])
    code, error = driver.ended()
    late = "was still busy when its share of the shutdown's time was over"  # of a loaded machine
    assert code == 0
    assert [line for line in error.splitlines() if late not in line] == []


# Cores.


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has no parts")
def test_workers_keep_to_cores_of_their_own_where_there_are_enough(launcher):
    mine = os.sched_getaffinity(0)
    executor = launcher.start(workers=2)
    first, second = (set(each["cores"]) for each in executor.collective_rpc(about))
    assert first | second == mine
    assert not first & second


def test_more_workers_than_cores_share_them_all_and_it_is_logged(launcher, caplog):
    mine = sorted(os.sched_getaffinity(0))
    with caplog.at_level(logging.INFO, logger="hardpoint"):
        executor = launcher.start(workers=len(mine) + 1)
    assert {tuple(each["cores"]) for each in executor.collective_rpc(about)} == {tuple(mine)}
    assert f"{len(mine) + 1} workers share {len(mine)} cores, one thread each" in caplog.text


@pytest.mark.parametrize("start", START)
@pytest.mark.parametrize("own", ["", "2"])
def test_workers_that_share_cores_start_one_thread_unless_told_otherwise(
    launcher, monkeypatch, start, own
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if own:
        monkeypatch.setenv("OMP_NUM_THREADS", own)
    workers = len(os.sched_getaffinity(0)) + 1
    executor = launcher.start(workers=workers, **{"plugins.mp.start": start})
    told = executor.collective_rpc(lambda worker: os.environ["OMP_NUM_THREADS"])
    assert told == [own or "1"] * workers


def test_binding_can_be_switched_off(launcher):
    executor = launcher.start(**{"plugins.mp.bind": False})
    mine = sorted(os.sched_getaffinity(0))
    assert [each["cores"] for each in executor.collective_rpc(about)] == [mine] * 2


# Devices.


def test_each_worker_owns_devices_of_its_own(launcher):
    executor = launcher.start(devices=("4", "2", "0"))
    assert executor.collective_rpc(lambda worker: worker.context.devices) == [("4",), ("2",)]


def test_too_few_devices_are_an_error_before_anything_is_started(launcher):
    with pytest.raises(ConfigError, match=r"devices = .*2 workers need 2 devices"):
        launcher.start(devices=("4",))


# Rendezvous.


def test_all_workers_are_given_one_nameless_meeting_place(launcher):
    def meet(worker):
        from pathlib import Path

        path = Path(worker.context.rendezvous.removeprefix("file://"))
        status = path.stat()
        return status.st_ino, status.st_nlink, str(path.readlink())

    executor = launcher.start(workers=3)
    (place,) = set(executor.collective_rpc(meet))
    assert place[1] == 0
    assert place[2].startswith("/memfd:")
    assert launcher.start(workers=1).collective_rpc(lambda worker: worker.context.rendezvous) == [
        None
    ]
    assert set(launcher.start(workers=2).collective_rpc(meet)) != {place}


def test_a_json_line_of_the_driver_is_not_disturbed_by_what_workers_print(drivers):
    driver = drivers("shutdown")
    for _ in range(4):
        assert json.dumps(driver.line())
