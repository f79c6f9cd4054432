"""How long the commands take as whole processes: wall time, time to the first byte of output, peak
memory; and what a served model takes beside its weights.

python benchmarks/start.py [--repeats 5] [--json]

The fastest of the repeats count: what disturbs them only ever makes them slower, and the first may
write the bytecode of files that were edited. `cold` packs the weights of the default model,
`packed` maps what a start before it has packed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

QUESTION = "What is the capital of France?"
GENERATE = ["generate", "--temperature", "0", "--max-tokens", "16", QUESTION]
W8A8 = [*GENERATE, "--quantization", "w8a8"]
COMMANDS = {
    "help": ["--help"],
    "plugins": ["plugins"],
    "generate": GENERATE,
    "cold": W8A8,
    "packed": W8A8,
}
FIRST_OUTPUT = {"generate": 3.0, "cold": 3.0, "packed": 2.0}
"""The most seconds to the first token."""
MOST_MEMORY = 1.3
"""The most of the peak, as a share of weights, KV cache and torch's own import together."""
MEASURE = """
import json, re, resource
from pathlib import Path
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
import torch
imported = peak()
from hardpoint_engine import LLM, SamplingParams
def resident(spans):
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            low, high = (int(each, 16) for each in span.groups())
            inside = any(low < last and first < high for first, last in spans)
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found
def held(worker):
    runner = worker.get_model_runner()
    model, caches = runner.get_model(), runner.kv_cache.layers.values()
    weights = {each.data_ptr(): each.nbytes for each in model.parameters()}
    spans = [(each.key.data_ptr(), each.value.data_ptr() + each.value.nbytes) for each in caches]
    return sum(weights.values()), resident(spans)
with LLM(platform="cpu", executor="uni") as llm:
    llm.generate(["What is the capital of France?"], SamplingParams(temperature=0, max_tokens=16))
    weights, cache = llm.collective_rpc(held)[0]
print(json.dumps({"import": imported, "weights": weights, "kv_cache": cache, "peak": peak()}))
"""


def run(arguments: list[str], environ: dict[str, str]) -> dict[str, float]:
    program = shutil.which("hardpoint", path=str(Path(sys.executable).parent)) or "hardpoint"
    start = time.perf_counter()
    process = subprocess.Popen(
        [program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ
    )
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 1)
    first_byte = time.perf_counter() - start
    process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or not first:
        raise SystemExit(f"hardpoint {' '.join(arguments)} ended with {process.returncode}")
    return {
        "wall_s": wall,
        "first_byte_s": first_byte,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_mib": usage.ru_maxrss / 1024,
    }


def best(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(min(run[key] for run in runs), 3) for key in runs[0]}


def memory() -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", MEASURE], check=True, capture_output=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    parts = found["import"] + found["weights"] + found["kv_cache"]
    return {**found, "share": round(found["peak"] / parts, 3)}


def measure(repeats: int) -> dict[str, object]:
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory(prefix="hardpoint-start-") as folder:
        environ = {**os.environ, "XDG_CACHE_HOME": folder}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed has its bytecode
        for _ in range(repeats):
            shutil.rmtree(Path(folder, "hardpoint"), ignore_errors=True)
            for name, arguments in COMMANDS.items():
                runs[name].append(run(arguments, environ))
    rows = [{"command": name} | best(found) for name, found in runs.items()]
    taken = memory()
    firsts = {str(row["command"]): float(row["first_byte_s"]) for row in rows}
    bounds = [
        {"name": f"{name}: first token, s", "value": firsts[name], "bound": most}
        for name, most in FIRST_OUTPUT.items()
    ]
    bounds.append({"name": "peak of memory", "value": taken["share"], "bound": MOST_MEMORY})
    judged = [{**each, "met": each["value"] <= each["bound"]} for each in bounds]
    return {"rows": rows, "memory": taken, "bounds": judged, "repeats": repeats}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.repeats)
    if options.json:
        print(json.dumps(found))
        return
    for row in found["rows"]:
        print(
            f"{row['command']:10} first output {row['first_byte_s']:6.2f} s   "
            f"whole {row['wall_s']:6.2f} s   processors {row['cpu_s']:6.2f} s   "
            f"peak {row['peak_mib']:7.0f} MiB"
        )
    print("  ".join(f"{name} {value / 2**20:.0f} MiB" for name, value in found["memory"].items()
                    if name != "share"))  # fmt: skip
    for each in found["bounds"]:
        verdict = "met" if each["met"] else "NOT MET"
        print(f"{each['name']:30}{each['value']:8.2f}  bound {each['bound']:g}  {verdict}")


if __name__ == "__main__":
    main()
