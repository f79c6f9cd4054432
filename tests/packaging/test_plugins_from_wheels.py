"""Plugins of third parties as people get them: wheels, built and installed by pip."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import textwrap
import venv
from pathlib import Path

import pytest

PLATFORM = """
from hardpoint_dummy.platform import DummyPlatform
from hardpoint.records import Verdict

class Zork(DummyPlatform):
    name = "zork"

    def probe(self):
        return Verdict(available=True, priority=40, reason="a lamp and a sword")
"""

HEAD = """
from hardpoint.hookspecs import hookimpl
from hardpoint.records import ExtensionRecord, PlatformRecord
"""

PLUGIN = (
    HEAD
    + """
@hookimpl
def hardpoint_platform():
    return PlatformRecord(
        name="zork", api=(2, 0), platform="{package}.platform:Zork",
        settings="hardpoint_dummy.settings:DummySettings",
    )
"""
)

TRACER = (
    HEAD
    + """
import os

heard = []

@hookimpl
def hardpoint_extension():
    return ExtensionRecord(name="tracer", api=(1, 3))

@hookimpl
def hardpoint_model_loaded(worker):
    heard.append((os.getpid(), worker.rank))
"""
)

BROKEN = "raise ImportError('libbroken.so.3: cannot open shared object file')\n"
LATER = "import pathlib\npathlib.Path(__file__).with_suffix('.imported').touch()\n"

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"
requires-python = ">=3.11"
dependencies = ["hardpoint{needs}"]

{entry_points}

[tool.hatch.build.targets.wheel]
packages = ["{package}"]
"""


def build(folder: Path, name: str, version: str, needs: str, plugins: dict, files: dict) -> Path:
    """Build a wheel of one package with ``files``; ``plugins`` is group -> name -> module."""
    package = name.replace("-", "_")
    source = folder / f"{name}-{version}-source"
    (source / package).mkdir(parents=True)
    (source / package / "__init__.py").touch()
    for file, text in files.items():
        (source / package / file).write_text(text.replace("{package}", package))
    groups = "".join(
        f'[project.entry-points."hardpoint.{group}"]\n'
        + "".join(f'{key} = "{package}.{module}"\n' for key, module in entries.items())
        for group, entries in plugins.items()
    )
    (source / "pyproject.toml").write_text(
        PROJECT.format(
            name=name, version=version, needs=needs, entry_points=groups, package=package
        )
    )
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run(
        [*command, str(source)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / f"{package}-{version}-py3-none-any.whl"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("third-party")
    two = {"platforms": {"zork": "plugin"}, "extensions": {"tracer": "tracer"}}
    files = {"plugin.py": PLUGIN, "platform.py": PLATFORM, "tracer.py": TRACER}
    one = {"platforms": {"zork": "plugin"}}
    return {
        "good": build(folder, "acme-units", "1.0", ">=0.1", two, files),
        "newer": build(folder, "acme-units", "1.1", ">=0.1", two, files),
        "rival": build(folder, "rival-units", "3.0", ">=0.1", one, files),
        "broken": build(
            folder, "broken-units", "4.2", ">=0.1",
            {"platforms": {"broken": "plugin"}}, {"plugin.py": BROKEN},
        ),
        "later": build(
            folder, "later-units", "9.0", ">=9,<10",
            {"platforms": {"later": "plugin"}}, {"plugin.py": LATER},
        ),
    }  # fmt: skip


class Environment:
    """A virtual environment that sees this repository's distributions, to install wheels into."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False)
        self.python = str(folder / "bin" / "python")
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.site = folder / "lib" / version / "site-packages"
        ours = sysconfig.get_path("purelib")
        (self.site / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")

    def install(self, *wheels: Path) -> None:
        command = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet"]
        command += ["--no-deps", "--no-index", "--disable-pip-version-check", "--no-compile"]
        subprocess.run([*command, *map(str, wheels)], check=True, timeout=120)

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HARDPOINT_")}
        kept.pop("PYTHONPATH", None)
        return subprocess.run(
            [self.python, *arguments], capture_output=True, text=True, timeout=120, check=False,
            env={**kept, **variables},
        )  # fmt: skip

    def hardpoint(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run("-c", "from hardpoint.cli import main; main()", *arguments, **variables)

    def code(self, text: str, *arguments: str, **variables: str) -> str:
        done = self.run("-c", textwrap.dedent(text), *arguments, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def environment(tmp_path) -> Environment:
    return Environment(tmp_path / "environment")


def selected(done) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["selected"]


def test_a_wheel_that_breaks_is_told_once_and_raises_when_named(environment, wheels):
    environment.install(wheels["good"], wheels["broken"])
    done = environment.hardpoint("doctor", "--json")
    assert selected(done)["platform"] == "zork"
    assert done.stderr.count("broken-units") == 1
    for fact in ("4.2", "broken = broken_units.plugin", "ImportError", "libbroken.so.3"):
        assert fact in done.stderr
    code = """
        from hardpoint.config import Config
        from hardpoint.registry import Registry
        from hardpoint.selection import select_platform
        config = Config(platform="broken")
        registry = Registry.discover(config)
        for _ in range(2):
            try:
                select_platform(registry, config)
            except Exception as error:
                print(type(error).__name__, type(error.__cause__).__name__, id(error.__cause__))
        """
    first, second = environment.code(code).splitlines()
    assert first == second
    assert first.startswith("PluginLoadError ImportError")
    strict = environment.hardpoint("doctor", "--json", HARDPOINT_PLUGINS__STRICT="true")
    assert "broken-units 4.2" in selected(strict)["error"]
    quiet = environment.hardpoint("doctor", "--json", HARDPOINT_DISABLE="broken")
    told = [line for line in quiet.stderr.splitlines() if "the probe of" not in line]  # it was slow
    assert told == []


def test_a_wheel_for_another_core_is_refused_before_it_is_imported(environment, wheels):
    environment.install(wheels["later"])
    done = environment.hardpoint("plugins", "--json")
    row = next(row for row in json.loads(done.stdout)["plugins"] if row["name"] == "later")
    assert row["state"] == "refused"
    assert "hardpoint<10,>=9" in row["reason"]
    assert "hardpoint 0.1.0" in row["reason"]
    assert not list(environment.site.glob("later_units/*.imported"))


def test_two_wheels_that_claim_one_name(environment, wheels):
    environment.install(wheels["good"], wheels["rival"])
    error = selected(environment.hardpoint("doctor", "--json"))["error"]
    for words in ("acme-units 1.0", "rival-units 3.0", "plugins.provider.zork"):
        assert words in error
    chosen = environment.hardpoint(
        "doctor", "zork", "--json", "--set", "plugins.provider.zork=rival-units"
    )
    assert chosen.returncode == 0, chosen.stderr
    assert json.loads(chosen.stdout)["platforms"][0]["available"]


def test_a_wheel_installed_a_moment_ago_is_seen_by_a_running_process(environment, wheels):
    code = """
        import subprocess, sys
        from hardpoint.config import Config
        from hardpoint.registry import Registry
        print(Registry.discover(Config()).has("platform", "zork"))
        subprocess.run(sys.argv[1:], check=True)
        registry = Registry.discover(Config())
        print(registry.platform("zork").probe().reason)
        """
    command = [sys.executable, "-m", "pip", "--python", environment.python, "install", "--quiet"]
    command += ["--no-deps", "--no-index", "--disable-pip-version-check", str(wheels["good"])]
    assert environment.code(code, *command).splitlines() == ["False", "a lamp and a sword"]


def test_an_unknown_platform_runs_the_whole_way_and_workers_load_the_same(environment, wheels):
    environment.install(wheels["good"])
    code = """
        import os, pickle, sys
        from hardpoint_engine import LLM, SamplingParams
        with LLM(model="dummy", load_format="dummy") as llm:
            assert llm.executor.platform.name == "zork", llm.executor.platform.name
            (result,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))
            assert len(result.outputs[0].token_ids) == 4, result
            resolved = llm.executor.registry.resolved()
        import acme_units.tracer
        assert acme_units.tracer.heard == [(os.getpid(), 0)], acme_units.tracer.heard
        with open(sys.argv[1], "wb") as file:
            pickle.dump(resolved, file)
        print([(each.name, each.distribution, each.version) for each in resolved])
        """
    handed = str(environment.site / "resolved")
    out = environment.code(code, handed)
    assert "('zork', 'acme-units', '1.0')" in out
    assert "('tracer', 'acme-units', '1.0')" in out
    worker = """
        import pickle, sys
        from hardpoint.registry import Registry
        resolved = pickle.load(open(sys.argv[1], "rb"))
        try:
            registry = Registry.from_resolved(resolved)
        except Exception as error:
            print(type(error).__name__, error)
        else:
            assert registry.resolved() == resolved
            print("the same")
        """
    assert environment.code(worker, handed).strip() == "the same"
    environment.install(wheels["newer"])
    refusal = environment.code(worker, handed)
    for words in ("IncompatiblePluginError", "acme-units 1.0", "acme-units 1.1"):
        assert words in refusal
