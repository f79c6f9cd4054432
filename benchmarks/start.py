"""How long the commands take as whole processes: wall time, time to the first byte of output, peak
memory.

python benchmarks/start.py [--repeats 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

QUESTION = "What is the capital of France?"
COMMANDS = {
    "help": ["--help"],
    "plugins": ["plugins"],
    "generate": ["generate", "--temperature", "0", "--max-tokens", "16", QUESTION],
}


def run(arguments: list[str]) -> dict[str, float]:
    program = shutil.which("hardpoint", path=str(Path(sys.executable).parent)) or "hardpoint"
    start = time.perf_counter()
    process = subprocess.Popen(
        [program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
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
    return {"wall_s": wall, "first_byte_s": first_byte, "peak_mib": usage.ru_maxrss / 1024}


def middle(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in COMMANDS}
    for _ in range(options.repeats):
        for name, arguments in COMMANDS.items():
            runs[name].append(run(arguments))
    rows = [{"command": name} | middle(found) for name, found in runs.items()]
    if options.json:
        print(json.dumps({"rows": rows, "repeats": options.repeats}))
        return
    for row in rows:
        print(
            f"{row['command']:10} first output {row['first_byte_s']:6.2f} s   "
            f"whole {row['wall_s']:6.2f} s   peak {row['peak_mib']:7.0f} MiB"
        )


if __name__ == "__main__":
    main()
