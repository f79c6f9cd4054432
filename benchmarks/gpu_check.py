"""The steps of ``gpu_check.sh``, one after another, and what a checkout needs to run without being
installed. The steps themselves are in ``gpu_steps.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
DISTRIBUTIONS = (
    "core", "engine", "runtime", "plugins/uniproc", "plugins/multiproc", "plugins/cpu",
    "plugins/cuda",
)  # fmt: skip
STEPS = {
    "pools": 25, "probe": 40, "greedy": 65, "graphs": 75, "sleep": 45, "kernels": 45, "streams": 15,
    "collectives": 10, "nursery": 45, "speed": 50, "bandwidth": 30, "transformers": 30,
}  # fmt: skip
"""Step -> the seconds that are kept for it, all together less than the 8 minutes; in the order in
which they run, the most telling first.
"""
PATIENCE = 10
"""How much longer a step may take where nothing is measured, on a busy machine."""
GRACE = 3.0
"""Seconds in which the processes of a step that has ended may end by themselves."""
NO_GPU = "no NVIDIA GPU: step skipped"
NEEDED = (
    "attrs", "cattrs", "click", "cloudpickle", "gguf", "jinja2", "msgpack", "numpy", "packaging",
    "pluggy", "safetensors", "tokenizers", "torch", "zmq",
)  # fmt: skip
"""Modules without which no step runs. NVML's is not among them: the probe does without."""
LOG = "gpu_check.log"
"""Where steps print, so that also a killed one leaves what it had found."""
ERRORS = "gpu_check.err"
"""Where they and their workers complain: a pipe would be open for as long as one of these lives."""
BECOME_REAPER, END_WITH_PARENT = 36, 1  # PR_SET_CHILD_SUBREAPER and PR_SET_PDEATHSIG of Linux


def metadata_of(folder: Path, site: Path) -> None:
    """Write what an installer would write of a distribution, so that its entry points are found."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    target = site / f"{name.replace('-', '_')}-{version}.dist-info"
    target.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {each}" for each in project.get("dependencies", ())]
    (target / "METADATA").write_text("\n".join(lines) + "\n")
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    entries = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in names.items())
        for group, names in groups.items()
    ]
    (target / "entry_points.txt").write_text("\n".join(entries))


def whole_wheels(folder: Path, scratch: Path) -> list[Path]:
    """Return the wheels of a folder; those that came in parts (``NAME.whl.part-aa``, ``-ab``, as
    ``split`` names them) are put together in ``scratch``.
    """
    found = sorted(folder.glob("*.whl"))
    for part in sorted(folder.glob("*.whl.part-*")):
        whole = scratch / part.name.rpartition(".part-")[0]
        with whole.open("ab") as file:
            file.write(part.read_bytes())
        found += [whole] if whole not in found else []
    return found


def unpack(wheel: Path, site: Path) -> None:
    """Do what an installer does with a wheel's modules: nothing else is needed, and pip may be
    absent. Raises ValueError naming a file that is no wheel.
    """
    try:
        with zipfile.ZipFile(wheel) as file:
            file.extractall(site)
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"{wheel.name}: {error}") from error
    for folder in [*site.glob("*.data/purelib"), *site.glob("*.data/platlib")]:
        shutil.copytree(folder, site, dirs_exist_ok=True)
        shutil.rmtree(folder)


def make_site(site: Path, wheels: Path | None) -> str:
    """Make a folder from which the checkout can be imported; return the PYTHONPATH for it."""
    for name in DISTRIBUTIONS:
        if (TOP / name).is_dir():
            metadata_of(TOP / name, site)
    if wheels is not None:
        with tempfile.TemporaryDirectory() as scratch:
            found = whole_wheels(wheels, Path(scratch))
            if not found:
                raise FileNotFoundError(f"no wheels in {wheels}")
            for wheel in found:
                unpack(wheel, site)
    paths = [str(site), *(str(TOP / name / "src") for name in DISTRIBUTIONS)]
    return os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


def missing(environment: dict[str, str]) -> list[str]:
    """Return the modules that cannot be found there."""
    code = (
        "import importlib.util, json, sys\n"
        "print(json.dumps([n for n in sys.argv[1:] if importlib.util.find_spec(n) is None]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *NEEDED], env=environment, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def gpu_is_here(environment: dict[str, str]) -> bool:
    """Whether the driver's own tool or torch sees a GPU; asked in processes of their own. A tool
    that fails may be of another version than the driver, and says nothing against torch.
    """
    torch = "import torch; raise SystemExit(not torch.cuda.is_available())"
    for command in (["nvidia-smi", "-L"], [sys.executable, "-c", torch]):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                command, env=environment, capture_output=True, check=False, timeout=60
            )
            if done.returncode == 0:
                return True
    return False


def children() -> set[int]:
    """Return the processes whose parent this one is."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # PID (NAME) STATE PARENT ...; a name may have blanks and brackets in it.
            if int(status.read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(status.parent.name))
    return found


@contextlib.contextmanager
def adopting():
    """Become the parent of whom a step leaves behind, whatever session he began."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(BECOME_REAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(BECOME_REAPER, 0, 0, 0, 0)


def end_with_parent() -> None:
    """Have this process, a step, ended when the script is: also one that is killed leaves nobody
    who holds the GPU.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(END_WITH_PARENT, 9, 0, 0, 0)


def end_rest(group: int, before: set[int], grace: float) -> int:
    """End what a step left behind: after ``grace`` seconds by force. Return how many were forced.
    What cannot be ended, as a process that waits for the driver, is left after twice that time.
    """
    forced = set()
    begun = time.monotonic()
    while (rest := children() - before) and time.monotonic() - begun < 2 * grace + 1:
        for process in rest:
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                if os.waitpid(process, os.WNOHANG)[0]:
                    continue
                if time.monotonic() - begun >= grace:
                    os.kill(process, 9)
                    forced.add(process)
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, 9)  # where nobody is adopted: at least those of its session
    return len(forced)


def run_step(name: str, seconds: float, options: argparse.Namespace, environment) -> dict:
    """Run one step in a process of its own; return its line. It has its time, and no more."""
    command = [sys.executable, str(TOP / "benchmarks" / "gpu_steps.py"), name]
    command += ["--dry-run"] if options.dry_run else []
    command += ["--model", options.model] if options.model else []
    command += ["--no-sleep", options.no_sleep] if options.no_sleep else []
    started = time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    with (
        (options.out / LOG).open("a+", errors="replace") as log,
        (options.out / ERRORS).open("a+", errors="replace") as errors,
        adopting(),
    ):
        starts = [file.seek(0, os.SEEK_END) for file in (log, errors)]
        before = children()
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=errors, start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - no other thread runs here
        )  # fmt: skip
        late = cut = False
        try:
            process.wait(timeout=seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as reason:
            late, cut = True, isinstance(reason, KeyboardInterrupt)
            os.killpg(process.pid, 9)  # the session that was begun for this step
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE)
        forced = end_rest(process.pid, before, 0.0 if late else GRACE)
        process.poll()
        for file, start in zip((log, errors), starts, strict=True):
            file.seek(start)
        found, err = last_object(log.read()), errors.read()
    if late and "outcome" in found and not cut:
        found["did_not_end_in_seconds"] = round(seconds)
    elif cut:
        found = {"outcome": "cut", "reason": "the script was told to end", "so_far": found}
    elif late:
        found = {"outcome": "timeout", "reason": f"above {seconds:.0f} s", "so_far": found}
    elif "outcome" not in found:
        found = {"outcome": "error", "reason": f"exit code {process.returncode}", "so_far": found}
    if found["outcome"] not in ("ok", "skipped"):
        found["stderr"] = err[-1500:]
    if forced and not late:
        found["processes_left_behind"] = forced
    return _line(name, found.pop("outcome"), started, **found)


def limit(name: str, names: list[str], left: float) -> float:
    """Return how many seconds a step may take when ``left`` are left for it and those after it:
    its own, and what these do not need.
    """
    kept = sum(STEPS[each] for each in names[names.index(name) + 1 :])
    return min(left, max(STEPS[name], left - kept))


def last_object(text: str) -> dict:
    """Return the last line that is a JSON object, or an empty one: a killed step ends anywhere."""
    for line in reversed(text.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {}


def _line(name: str, outcome: str, started: float, **more: object) -> dict:
    seconds = round(time.perf_counter() - started, 2)
    return {"step": name, "outcome": outcome, "seconds": seconds, **more}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="on host memory, a tiny model")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu_check")))
    parser.add_argument("--wheels", type=Path, help="a folder of wheels that are not installed")
    parser.add_argument(
        "--model", help="a checkpoint, or random; by default the default model, else random"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no step after that")
    parser.add_argument("--only", default=",".join(STEPS), help="steps, separated by commas")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options.no_sleep = ""
    asked = options.only.split(",")
    if unknown := [name for name in asked if name not in STEPS]:
        parser.error(f"no step {unknown[0]!r}: they are {', '.join(STEPS)}")
    names = [name for name in STEPS if name in asked]
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.minutes * 60
    outcomes = []
    with (
        tempfile.TemporaryDirectory() as site,
        (options.out / "gpu_check.jsonl").open("a") as results,
    ):

        def tell(line: dict) -> None:
            outcomes.append(line["outcome"])
            text = json.dumps(line)
            print(text, flush=True)
            results.write(text + "\n")
            results.flush()
            os.fsync(results.fileno())

        started = time.perf_counter()
        try:
            environment = {**os.environ, "PYTHONPATH": make_site(Path(site), options.wheels)}
            environment.pop("PYTHONSAFEPATH", None)  # steps import what lies beside them
            absent = ", ".join(missing(environment))
            reason = f"missing: {absent}" if absent else None
        except Exception as error:  # noqa: BLE001 - whatever it is, the line must say it
            said = getattr(error, "stderr", None) or ""
            reason = f"{type(error).__name__}: {error} {said}"[:3000]
        if reason is not None:
            tell(_line("environment", "error", started, reason=reason.strip()))
            return 1
        here = options.dry_run or gpu_is_here(environment)
        for name in names:
            left = end - time.monotonic()
            if not here:
                tell({"step": name, "outcome": "skipped", "reason": NO_GPU})
            elif left < 5:
                tell({"step": name, "outcome": "skipped", "reason": "no time is left"})
            else:
                most = STEPS[name] * PATIENCE if options.dry_run else limit(name, names, left)
                line = run_step(name, min(most, left), options, environment)
                tell(line)
                bad = line["outcome"] in ("failed", "error") or line.get("so_far")
                if line["outcome"] == "cut":
                    break
                if name == "pools" and bad:  # one that was cut while it imported says nothing
                    options.no_sleep = f"the step pools: {line['outcome']}"
    return int(any(outcome not in ("ok", "skipped") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
