"""The steps of ``gpu_check.sh``, one after another, and what a checkout needs to run without being
installed. The steps themselves are in ``gpu_steps.py``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
DISTRIBUTIONS = (
    "core", "engine", "runtime", "plugins/uniproc", "plugins/multiproc", "plugins/cpu",
    "plugins/cuda",
)  # fmt: skip
STEPS = {
    "probe": 45, "greedy": 90, "graphs": 90, "sleep": 60, "kernels": 75, "streams": 30,
    "nursery": 60, "speed": 75, "bandwidth": 60, "transformers": 75,
}  # fmt: skip
"""Step -> the most seconds that it may take; in the order in which they run."""
PATIENCE = 10
"""How much longer a step may take where nothing is measured, on a busy machine."""
NO_GPU = "no NVIDIA GPU: step skipped"
NEEDED = (
    "attrs", "cattrs", "click", "cloudpickle", "gguf", "jinja2", "msgpack", "numpy", "packaging",
    "pluggy", "safetensors", "tokenizers", "torch", "zmq",
)  # fmt: skip
"""Modules without which no step runs. NVML's is not among them: the probe does without."""
LOG = "gpu_check.log"
"""Where steps print, so that also a killed one leaves what it had found."""


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


def make_site(site: Path, wheels: Path | None) -> str:
    """Make a folder from which the checkout can be imported; return the PYTHONPATH for it."""
    for name in DISTRIBUTIONS:
        if (TOP / name).is_dir():
            metadata_of(TOP / name, site)
    if wheels is not None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps",
                   "--no-compile", "--target", str(site)]  # fmt: skip
        with tempfile.TemporaryDirectory() as scratch:
            subprocess.run([*command, *map(str, whole_wheels(wheels, Path(scratch)))], check=True)
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


def gpu_is_here() -> bool:
    """Whether the driver's own tool or torch sees a GPU; asked in processes of their own."""
    if shutil.which("nvidia-smi"):
        return (
            subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0
        )
    if importlib.util.find_spec("torch") is None:
        return False
    asked = [sys.executable, "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


def run_step(name: str, seconds: float, options: argparse.Namespace, environment) -> dict:
    """Run one step in a process of its own; return its line. It has its time, and no more."""
    command = [sys.executable, str(TOP / "benchmarks" / "gpu_steps.py"), name]
    command += ["--dry-run"] if options.dry_run else []
    command += ["--model", options.model] if options.model else []
    started = time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / LOG).open("a+") as log:
        begin = log.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        late = False
        try:
            _, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            late = True
            os.killpg(process.pid, 9)  # the session that was begun for this step
            _, err = process.communicate()
        log.seek(begin)
        found = last_object(log.read())
    if late:
        found = {"outcome": "timeout", "reason": f"above {seconds:.0f} s", "so_far": found}
    elif "outcome" not in found:
        found = {"outcome": "error", "reason": f"exit code {process.returncode}", "so_far": found}
    if found["outcome"] not in ("ok", "skipped"):
        found["stderr"] = err[-1500:]
    return _line(name, found.pop("outcome"), started, **found)


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
    names = options.only.split(",")
    if unknown := [name for name in names if name not in STEPS]:
        parser.error(f"no step {unknown[0]!r}: they are {', '.join(STEPS)}")
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

        environment = {**os.environ, "PYTHONPATH": make_site(Path(site), options.wheels)}
        if absent := missing(environment):
            named = ", ".join(absent)
            tell(_line("environment", "error", time.perf_counter(), reason=f"missing: {named}"))
            return 1
        here = options.dry_run or gpu_is_here()
        for name in (each for each in STEPS if each in names):
            left = end - time.monotonic()
            if not here:
                tell({"step": name, "outcome": "skipped", "reason": NO_GPU})
            elif left < 5:
                tell({"step": name, "outcome": "skipped", "reason": "no time is left"})
            else:
                most = STEPS[name] * (PATIENCE if options.dry_run else 1)
                tell(run_step(name, min(most, left), options, environment))
    return int(any(outcome not in ("ok", "skipped") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
