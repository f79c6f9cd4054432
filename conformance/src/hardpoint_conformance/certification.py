"""Certifying one plugin in a process of its own, where nobody else's pytest plugins are loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint.errors import HardpointError

from hardpoint_conformance.certificate import SUITES

if TYPE_CHECKING:
    from hardpoint.discovery import Plugin

CLASSES = {
    "plugin": "PluginSuite",
    "platform": "PlatformSuite",
    "worker": "WorkerSuite",
    "model runner": "ModelRunnerSuite",
    "executor": "ExecutorSuite",
}
"""Name of a suite in certificates -> its class."""
PYTEST = (
    "--quiet", "--no-header", "-p", "no:cacheprovider", "-p", "hardpoint_conformance.pytest_plugin",
    "--import-mode=importlib", "-W", "ignore",
)  # fmt: skip


class CertificationError(HardpointError):
    """The tests could not be run at all, or not be told of: the message has what pytest said, or
    what could not be loaded.

    What to do: run the suites from a test module of your own, and read what pytest shows.
    """


def certified(
    plugin: Plugin,
    executor: str | None,
    settings: Mapping[str, object],
    *,
    watch: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run all suites of ``plugin`` and return its certificate as plain data.

    ``watch`` is called with each line that pytest prints meanwhile.
    """
    with tempfile.TemporaryDirectory(prefix="hardpoint-conformance-") as name:
        folder = Path(name)
        (folder / "test_certification.py").write_text(_module(plugin, executor, settings))
        (folder / "pytest.ini").write_text("[pytest]\n")
        path = folder / "certificate.json"
        said = _run(folder, path, watch)
        found = json.loads(path.read_text())["certificates"] if path.exists() else ()
    if not found:
        raise CertificationError(f"the tests of {plugin.label} did not run:\n{said[-3000:]}")
    document: dict[str, Any] = found[0]
    if "results" not in document:  # of what cannot be loaded there is no more than that
        raise CertificationError("; ".join(document["reasons"]))
    return document


def _module(plugin: Plugin, executor: str | None, settings: Mapping[str, object]) -> str:
    """Return the test module that an author would write."""
    classes = [CLASSES[each] for each in SUITES[plugin.kind]]
    lines = [f"from hardpoint_conformance import {', '.join(classes)}"]
    for each in classes:
        what = f"{plugin.name!r}, kind={plugin.kind!r}, executor={executor!r}"
        lines.append(f"Test{each[:-5]} = {each}.of({what}, settings={dict(settings)!r})")
    return "\n".join(lines) + "\n"


def _run(folder: Path, certificate: Path, watch: Callable[[str], None] | None) -> str:
    command = [
        sys.executable, "-m", "pytest", *PYTEST, "-v", f"--rootdir={folder}",
        f"--confcutdir={folder}", f"--hardpoint-certificate={certificate}", str(folder),
    ]  # fmt: skip
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "",
                   "PYTEST_PLUGINS": ""}  # fmt: skip
    said = []
    with subprocess.Popen(  # noqa: S603 - this interpreter, the kit's own module
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env=environment,
    ) as process:  # fmt: skip
        try:
            for line in process.stdout or ():
                said.append(line)
                if watch is not None and "::" in line:
                    watch(line.strip().partition("::")[2])
        except BaseException:
            process.terminate()
            raise
    return "".join(said)
