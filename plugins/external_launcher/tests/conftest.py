"""Groups of real processes that a launcher might have started."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest


def _launched_ranks():
    path = Path(__file__).with_name("launched_ranks.py")
    spec = importlib.util.spec_from_file_location("external_launched_ranks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Launches:
    """Starts groups, by hand or by torchrun; ends what is left of them."""

    def __init__(self, module, folder):
        self.module = module
        self.folder = folder
        self.started = []

    def __call__(self, scene, size, *arguments, **options):
        folder = self.folder / f"group-{len(self.started)}"
        folder.mkdir()
        made = self.module.Ranks(self.module.PROGRAM, size, folder, scene, *arguments, **options)
        self.started.append(made)
        return made

    def settle(self, condition, within=240.0):
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > within:
                told = [(made.out(r), made.error(r)) for made in self.started for r in (0, 1)]
                raise TimeoutError(f"it never came true: {told}")
            time.sleep(0.02)


@pytest.fixture
def launch(tmp_path):
    launches = Launches(_launched_ranks(), tmp_path)
    yield launches
    for made in launches.started:
        made.end()
