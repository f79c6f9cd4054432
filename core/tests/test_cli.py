"""The command line as a person meets it: real processes, their output and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import hardpoint
import pytest
from hardpoint import cli

RUN = "from hardpoint.cli import main; main()"


class Shell:
    """Runs ``hardpoint`` in a process that sees the site beside what is installed."""

    def __init__(self, site) -> None:
        self.site = site

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", RUN, *arguments]

    def environment(self, **variables: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HARDPOINT_")}
        path = os.pathsep.join([str(self.site.folder), *filter(None, [kept.get("PYTHONPATH")])])
        return {**kept, "PYTHONPATH": path, **variables}

    def __call__(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), capture_output=True, text=True, timeout=60, check=False,
            env=self.environment(**variables),
        )  # fmt: skip


@pytest.fixture
def shell(site):
    return Shell(site)


def rows(done):
    assert done.returncode == 0, done.stderr
    return {(row["kind"], row["name"]): row for row in json.loads(done.stdout)["plugins"]}


def told(done):
    """Return the lines of stderr, but for that of a probe which a busy machine made slow."""
    return [line for line in done.stderr.splitlines() if "the probe of" not in line]


def test_plugins_lists_everything_with_its_state(shell, site):
    site.platform("acme", version="1.2", record='summary="a unit"')
    site.plugin("extension", "broken", source="raise ImportError('libbroken.so')")
    site.plugin("extension", "newer", api=(3, 1))
    site.plugin("executor", "one", distribution="first")
    site.plugin("executor", "one", distribution="second")
    site.plugin("extension", "off", source="raise SystemExit")
    found = rows(shell("plugins", "--json", HARDPOINT_DISABLE="off"))
    acme = found["platform", "acme"]
    assert acme["distribution"] == "hp-acme"
    assert (acme["version"], acme["api"], acme["support_level"]) == ("1.2", "2.0", "L1")
    assert (acme["state"], acme["reason"], acme["summary"]) == ("loaded", "", "a unit")
    assert acme["hooks"] == ["hardpoint_platform"]
    states = {name: row["state"] for (_, name), row in found.items()}
    assert states["broken"] == "failed"
    assert "libbroken.so" in found["extension", "broken"]["reason"]
    assert states["newer"] == "refused"
    assert "plugin API 3.1, core API 2.0" in found["extension", "newer"]["reason"]
    assert states["one"] == "conflict"
    assert "second 1.0" in found["executor", "one"]["reason"]
    assert states["off"] == "disabled"
    assert found["platform", "dummy"]["state"] == "loaded"


def test_plugins_says_which_platforms_are_not_usable_here_and_why(shell, site):
    site.platform("acme", available=False, reason="no unit of acme is plugged in")
    done = shell("plugins")
    (line,) = (line for line in done.stdout.splitlines() if " acme " in line)
    assert line.endswith("unavailable  no unit of acme is plugged in")
    row = rows(shell("plugins", "--json"))["platform", "acme"]
    assert (row["state"], row["available"]) == ("loaded", False)
    assert row["verdict"] == "no unit of acme is plugged in"
    usable = rows(shell("plugins", "--json"))["platform", "dummy"]
    assert (usable["available"], usable["state"]) == (True, "loaded")
    asked = rows(shell("plugins", "--no-load", "--json"))["platform", "acme"]
    assert (asked["available"], asked["verdict"]) == (None, None)


def test_a_slow_probe_is_nothing_that_the_list_tells(shell, site):
    site.platform("acme", probe="import time; time.sleep(0.3)")
    done = shell("plugins")
    assert (done.returncode, done.stderr) == (0, "")
    assert "the probe of" in shell("doctor").stderr  # the doctor does


def test_plugins_as_a_table(shell, site):
    site.platform("acme")
    site.plugin("extension", "broken", source="raise ImportError('two\\nlines')")
    done = shell("plugins")
    lines = done.stdout.splitlines()
    heads = "KIND NAME DISTRIBUTION VERSION API LEVEL STATE REASON"
    assert lines[0].split() == heads.split()
    by_name = {line.split()[1]: line for line in lines}
    assert " ".join(by_name["acme"].split()[:7]) == "platform acme hp-acme 1.0 2.0 L1 loaded"
    broken = " ".join(by_name["broken"].split())
    assert broken.endswith("failed ImportError: two lines (plugin.py, line 9)")
    assert done.stderr == ""
    assert done.returncode == 0


def test_the_name_that_is_printed_is_the_name_that_is_accepted(shell, site):
    site.platform("acme", distribution="vendor-of-units")
    assert ("platform", "acme") in rows(shell("plugins", "--json"))
    done = shell("doctor", "--platform", "acme", "--json", HARDPOINT_DISABLE="dummy")
    assert json.loads(done.stdout)["selected"]["platform"] == "acme"
    done = shell("doctor", HARDPOINT_DISABLE="vendor_of_units")
    assert done.returncode == 0
    assert "Did you mean 'acme'? Plugins are named as `hardpoint plugins` prints" in done.stderr


def test_what_a_distribution_calls_itself_stands_for_its_plugin(shell, site):
    site.platform("acme", distribution="vendor-unitproc")
    for typed in ("unitproc", "unitprocess"):
        done = shell("doctor", HARDPOINT_DISABLE=typed)
        assert "Did you mean 'acme'" in done.stderr


def test_plugins_without_loading_imports_none(shell, site):
    site.platform("acme", source="raise SystemExit(9)")
    done = shell("plugins", "--no-load", "--json")
    row = rows(done)["platform", "acme"]
    assert (row["state"], row["api"]) == ("found", None)


def test_doctor_has_verdicts_the_choice_and_every_setting(shell, site):
    site.platform("acme", priority=50, reason="two units")
    site.platform("sick", available=False, reason="no driver")
    settings = {"HARDPOINT_MAX_NUM_SEQS": "3", "HARDPOINT_LOAD_FORMAT": "dummy"}
    done = shell("doctor", "--json", "--set", "plugins.dummy.num_workers=2", **settings)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    platforms = {row["name"]: row for row in report["platforms"]}
    assert platforms["acme"]["available"]
    assert platforms["acme"]["priority"] == 50
    assert (platforms["sick"]["available"], platforms["sick"]["reason"]) == (False, "no driver")
    assert {row["name"]: row["available"] for row in report["executors"]}["uni"]
    selected = {"platform": "acme", "executor": "uni", "model": "dummy", "error": None}
    assert report["selected"] == selected
    assert report["listeners"] == []
    found = {row["key"]: (row["value"], row["origin"]) for row in report["settings"]}
    assert found["max_num_seqs"] == (3, "HARDPOINT_MAX_NUM_SEQS")
    assert found["dtype"] == ("float32", "default of platform acme")
    assert found["model"] == ("dummy", "default model of load_format dummy")
    assert found["block_size"] == (16, "default of platform acme")
    assert found["plugins.dummy.num_workers"][0] == 2
    assert "--set" in found["plugins.dummy.num_workers"][1]
    assert found["plugins.dummy.step_seconds"] == (0.0, "default")


def test_doctor_as_text(shell, site):
    site.platform("acme", priority=50, reason="two units")
    done = shell("doctor")
    for words in ("two units", "only by name", "platform acme, executor uni", "max_num_seqs"):
        assert words in done.stdout
    assert done.returncode == 0


RUN_ON_DUMMY = ("doctor", "--platform", "dummy", "--load-format", "dummy", "--json")
CHANGING = """
@hookimpl
def hardpoint_configure(config):
    assert config.description is not None
    return [Change(key="block_size", old=None, new=32, reason="the unit works on 32")]

@hookimpl
def hardpoint_scheduling():
    return [Offer(name="fair", reference="hp_nc.plugin:Fair")]
"""


def test_doctor_shows_what_extensions_change_and_why(shell, site):
    site.plugin("extension", "nc", source=CHANGING)
    report = json.loads(shell(*RUN_ON_DUMMY, "--model", "dummy").stdout)
    assert report["selected"]["error"] is None
    found = {row["key"]: (row["value"], row["origin"]) for row in report["settings"]}
    assert found["block_size"] == (32, "plugin nc: the unit works on 32")
    assert found["model"] == ("dummy", "flag --model")
    report = json.loads(shell(*RUN_ON_DUMMY, "--block-size", "8").stdout)
    assert "flag --block-size set it to 8" in report["selected"]["error"]
    assert report["selected"]["executor"] is None


def test_doctor_knows_the_admission_policies(shell, site):
    site.plugin("extension", "nc", source=CHANGING)
    report = json.loads(shell(*RUN_ON_DUMMY, "--admission", "fair").stdout)
    assert report["selected"]["error"] is None
    report = json.loads(shell(*RUN_ON_DUMMY, "--admission", "fare").stdout)
    assert "admission = 'fare'" in report["selected"]["error"]
    assert "fair" in report["selected"]["error"]


def test_doctor_judges_the_configuration_and_the_model(shell, site, tmp_path):
    site.platform("acme")
    wrong = ("--platform", "acme", "--load-format", "dummy", "--max-loras", "2", "--json")
    report = json.loads(shell("doctor", *wrong).stdout)
    assert "max_loras" in report["selected"]["error"]
    assert (report["selected"]["platform"], report["selected"]["executor"]) == ("acme", "uni")
    absent = ("--platform", "acme", "--model", str(tmp_path / "none"), "--json")
    report = json.loads(shell("doctor", *absent).stdout)
    assert str(tmp_path / "none") in report["selected"]["error"]


def test_doctor_leaves_open_what_an_unknown_model_decides(shell, site):
    site.platform("acme", priority=50)
    hide = "from hardpoint import default_model; default_model.DISTRIBUTION = 'no-such'; "
    command = [sys.executable, "-c", hide + RUN, "doctor"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=shell.environment()
    )
    assert "platform acme, executor uni, a model, which has to be named (--model)" in done.stdout
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line}
    assert rows["dtype"] == ["'auto'", "default"]
    assert rows["block_size"] == ["16", "default", "of", "platform", "acme"]
    assert rows["plugins.disable"] == ["unset", "default"]
    assert rows["seed"] == ["unset", "default"]


def test_doctor_of_one_plugin(shell, site):
    site.platform("acme", available=False, reason="no unit answers")
    site.plugin("extension", "other", source="raise SystemExit")
    done = shell("doctor", "acme", "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    (row,) = report["platforms"]
    assert (row["available"], row["reason"]) == (False, "no unit answers")
    assert row["distribution"] == "hp-acme"
    assert row["capabilities"]["chunked prefill"] == "not yet"
    assert "executors" not in report
    assert told(done) == []
    fine = shell("doctor", "dummy")
    assert fine.returncode == 0
    assert "plugins.dummy.memory_bytes" in fine.stdout


def test_doctor_says_with_what_a_run_would_end(shell, site):
    site.platform("one", priority=900)
    site.platform("two", priority=900)
    report = json.loads(shell("doctor", "--json").stdout)
    assert "same priority" in report["selected"]["error"]
    assert report["selected"]["platform"] is None
    site.platform("three", more="def limits(self, config): return 1 / 0")
    done = shell("doctor", "--platform", "three")
    assert "A run would end with: ZeroDivisionError" in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("doctor", "acne"), ["acne", "Did you mean 'acme'", "hp-acme 1.0", "pip install"]),
        (("doctor", "--set", "dtipe=x"), ["dtipe", "Did you mean dtype"]),
        (("doctor", "--config", "no-such.toml"), ["no-such.toml"]),
        (("plugin",), ["plugin", "Did you mean 'plugins'"]),
        (("doctor", "--jsn"), ["--jsn"]),
    ],
)
def test_errors_are_one_paragraph_and_exit_code_2(shell, site, arguments, words):
    site.platform("acme")
    done = shell(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    for word in words:
        assert word in done.stderr


def test_an_unknown_name_to_disable_is_told_and_does_not_end_the_listing(shell, site):
    site.platform("acme")
    done = shell("plugins", HARDPOINT_DISABLE="acmee")
    assert done.returncode == 0
    assert "acme" in done.stdout
    assert "HARDPOINT_DISABLE" in done.stderr
    assert "Did you mean 'acme'" in done.stderr


COMMAND = """
import click, os, sys, time
from hardpoint.errors import ConfigError, HardpointError

@click.command()
@click.argument("what")
def go(what):
    if what == "user":
        raise ConfigError("the value is wrong")
    if what == "failure":
        raise HardpointError("the unit stopped")
    if what == "bug":
        raise ZeroDivisionError
    if what == "wait":
        print("waiting", flush=True)
        time.sleep(60)
    if what == "much":
        print("line\\n" * 100000)
    print("went", what)
"""


@pytest.fixture
def with_command(site):
    site.add("hp-go", "5", entry_points={"command": {"go": "go:go"}}, modules={"go": COMMAND})


def test_a_command_of_another_distribution_shows_its_summary(shell, site):
    source = COMMAND.replace("def go(what):", "def go(what):\n    'Go somewhere.'")
    site.add("hp-go", "5", entry_points={"command": {"go": "go:go"}}, modules={"go": source})
    assert "Go somewhere." in shell("--help").stdout


def test_commands_come_by_entry_point_and_only_the_typed_one_is_imported(shell, site, with_command):
    site.add(
        "hp-bad", entry_points={"command": {"bad": "bad:bad"}}, modules={"bad": "raise SystemExit"}
    )
    done = shell("--help")
    assert done.returncode == 0
    assert "from hp-go 5" in done.stdout  # it says nothing of itself
    assert "from hp-bad 1.0, which cannot be loaded" in done.stdout
    assert "every setting with its origin" in " ".join(done.stdout.split())
    assert "..." not in done.stdout.partition("Commands:")[2]
    assert "Traceback" not in done.stderr
    assert shell("go", "there").stdout == "went there\n"


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [("user", 2, "the value is wrong"), ("failure", 1, "the unit stopped")],
)
def test_errors_of_a_command_decide_the_exit_code(shell, with_command, what, code, words):
    done = shell("go", what)
    assert done.returncode == code
    assert done.stderr.strip().endswith(words)
    assert "Traceback" not in done.stderr


def test_a_bug_keeps_its_traceback(shell, with_command):
    done = shell("go", "bug")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    ("value", "requires", "words"),
    [
        ("broken:go", (), "no_such_library"),
        ("go:COMMAND", (), "'COMMAND'"),
        ("go:sys", (), "not a click command"),
        ("go:go", ("hardpoint>=99",), "requires hardpoint>=99"),
    ],
)
def test_a_broken_command_names_its_distribution(shell, site, value, requires, words):
    site.add(
        "hp-broken",
        "6",
        requires=requires,
        entry_points={"command": {"broken": value}},
        modules={"go": COMMAND, "broken": "import no_such_library"},
    )
    done = shell("broken", "x")
    assert done.returncode == 2
    assert "hp-broken 6" in done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupt_is_quiet(shell, with_command):
    process = subprocess.Popen(
        shell.command("go", "wait"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=shell.environment(),
    )  # fmt: skip
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out + err).strip() == ""


def test_an_interrupt_before_any_command_is_quiet_too(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    with pytest.raises(SystemExit) as caught:
        cli.main(["plugins"])
    assert caught.value.code == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_goes_away_ends_it_quietly(shell, with_command):
    process = subprocess.Popen(
        shell.command("go", "much"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=shell.environment(),
    )  # fmt: skip
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    process.wait(timeout=60)
    assert err == ""


@pytest.mark.parametrize("arguments", [("plugins",), ("doctor", "--json"), ("--version",)])
def test_a_full_disk_is_one_sentence(shell, arguments):
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        done = subprocess.run(
            shell.command(*arguments), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
            check=False, env=shell.environment(),
        )  # fmt: skip
    assert done.returncode == 1
    assert told(done) == ["Error: cannot write the output: No space left on device"]


@pytest.mark.parametrize(
    ("closed", "code"), [("<&-", 0), ("2>&-", 0), (">&-", 1)], ids=["in", "err", "out"]
)
def test_a_closed_standard_stream_is_no_accident(shell, closed, code):
    words = " ".join(f"'{word}'" for word in shell.command("plugins", "--json"))
    done = subprocess.run(
        ["/bin/sh", "-c", f"{words} {closed}"], capture_output=True, text=True, timeout=60,
        check=False, env=shell.environment(),
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if code:
        assert done.stderr.startswith("Error: standard output is closed")
    else:
        json.loads(done.stdout)


def test_version(shell):
    assert shell("--version").stdout == f"hardpoint {hardpoint.__version__} (contract API 2.0)\n"


def test_it_is_a_module_too(shell):
    """``python -m hardpoint``: the same words, errors and exit codes."""

    def as_module(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "hardpoint", *arguments], capture_output=True, text=True,
            timeout=60, check=False, env=shell.environment(),
        )  # fmt: skip

    for arguments in (("--help",), ("--version",), ("plugins", "no-such"), ("no-such",)):
        done, other = shell(*arguments), as_module(*arguments)
        assert (done.returncode, done.stdout, done.stderr) == (
            other.returncode, other.stdout, other.stderr,
        )  # fmt: skip


@pytest.mark.parametrize("arguments", [("--help",), ("plugins",)])
def test_it_is_light(site, arguments):
    """Nothing is imported that listing does not need."""
    heavy = ["rich", "cattrs", "tomllib", "numpy", "torch", "hardpoint_engine.llm"]
    heavy += ["asyncio.events"]
    code = (
        "import sys\nfrom hardpoint.cli import main\n"
        f"try: main({list(arguments)!r})\n"
        f"finally: print(sorted(set(sys.modules) & set({heavy!r})), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"
