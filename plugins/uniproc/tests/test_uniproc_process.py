"""The in-process executor and the life of its process: exit, Ctrl-C, environment."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

START = """
    import sys, time
    from attrs import evolve
    from hardpoint.checkpoints import read_description
    from hardpoint.config import resolution
    from hardpoint.config.loading import load_config
    from hardpoint.errors import *
    from hardpoint.messages import SchedulerOutput
    from hardpoint.registry import Registry
    from hardpoint.selection import select_executor, select_platform

    def start(**more):
        settings = dict(model="dummy", load_format="dummy", platform="dummy", executor="uni")
        config = load_config(overrides=settings | more, environ={})
        registry = Registry.discover(config)
        platform = select_platform(registry, config)
        config = evolve(config, description=read_description("dummy", "dummy"))
        config = resolution.fill_defaults(
            resolution.configure(config, registry, platform), platform
        )
        executor_class = select_executor(registry, config, platform)
        return executor_class.start(config, registry, platform)
"""


def run(code, *options, **more):
    source = textwrap.dedent(START) + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", *options, "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def finish(process, timeout=60):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


@pytest.mark.parametrize("options", [(), ("-O",)], ids=["plain", "optimised"])
def test_a_process_that_forgets_to_shut_down_ends_and_closes_its_worker(options):
    code = """
        executor = start()
        def close(worker, kept=executor.collective_rpc(lambda w: w.rank)):
            original = worker.shutdown
            worker.shutdown = lambda: (print("closed", flush=True), original())
        executor.collective_rpc(close)
        print("end", flush=True)
    """
    assert finish(run(code, *options)) == (0, "end\nclosed\n", "")


def test_a_stuck_worker_does_not_keep_the_process(tmp_path):
    code = """
        executor = start()
        executor.collective_rpc(lambda worker: __import__("time").sleep(3600), non_block=True)
        executor.shutdown(timeout=0.1)
        print("end", flush=True)
    """
    code_, out, err = finish(run(code))
    assert (code_, out) == (0, "end\n")
    assert "still busy at the deadline" in err


def test_ctrl_c_while_loading_ends_the_work_and_the_process():
    code = """
        import hardpoint_dummy.worker
        pause = hardpoint_dummy.worker.pause

        def told(*args):
            print("loading", flush=True)
            pause(*args)

        hardpoint_dummy.worker.pause = told
        try:
            start(**{"plugins.dummy.load_seconds": 3600})
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            sys.exit(130)
    """
    process = run(code)
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, "interrupted\n", "")


def test_the_executor_imports_neither_torch_nor_numpy():
    code = """
        executor = start()
        executor.collective_rpc("supported_tasks")
        executor.shutdown()
        heavy = {"torch", "numpy", "jax", "tokenizers"} & set(sys.modules)
        print(sorted(heavy))
    """
    assert finish(run(code)) == (0, "[]\n", "")


def test_a_forked_child_is_refused_at_once_and_the_parent_works_on():
    code = """
        import os, signal, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: the case
        executor = start()
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            for call in (
                lambda: executor.collective_rpc("supported_tasks"),
                lambda: executor.collective_rpc("supported_tasks", non_block=True),
                lambda: executor.check_health(),
            ):
                try:
                    call()
                except ExecutorFailedError as error:
                    told = f"started by process {os.getppid()}, and this is process {os.getpid()}"
                    print(told in str(error), flush=True)
            executor.shutdown()
            print("child", flush=True)
            os._exit(0)
        print(os.waitpid(pid, 0)[1], len(executor.collective_rpc("supported_tasks")))
        executor.shutdown()
    """
    assert finish(run(code)) == (0, "True\nTrue\nTrue\nchild\n0 1\n", "")


def test_errors_and_refusals_hold_without_assertions():
    code = """
        executor = start()
        for call in (
            lambda: executor.collective_rpc("_runner"),
            lambda: executor.execute_model(SchedulerOutput(step_id=1)),
            lambda: executor.collective_rpc("load_model"),
            lambda: executor.collective_rpc("add_lora", args=((x for x in ()),)),
            lambda: executor.wake_up([]),
            lambda: executor.sleep(3),
            lambda: executor.collective_rpc("supported_tasks", reply_rank=1),
            lambda: executor.collective_rpc(lambda worker: time.sleep(0.2), timeout=0),
        ):
            try:
                call()
            except Exception as error:
                print(type(error).__name__)
        executor.shutdown()
    """
    code_, out, err = finish(run(code, "-O"))
    assert (code_, err) == (0, "")
    assert out.split() == [
        "RemoteError", "RemoteError", "RemoteError", "EncodingError", "ValueError", "ValueError",
        "ValueError", "CallTimeoutError",
    ]  # fmt: skip


def test_the_light_module_imports_nothing_heavy():
    code = (
        "import sys, hardpoint_uniproc.plugin; print([n for n in sys.modules if 'hardpoint' in n])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(eval(out.stdout))
    assert "hardpoint.executor" not in loaded
    assert "hardpoint_uniproc.executor" not in loaded
