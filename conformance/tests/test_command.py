"""``hardpoint conformance``: exit codes, certificate, page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest
from click.testing import CliRunner
from hardpoint_conformance import certification
from hardpoint_conformance.command import conformance
from hardpoint_conformance.page import page_of


def run(*arguments):
    return CliRunner().invoke(conformance, arguments, standalone_mode=False)


def test_an_executor_is_certified_in_a_process_of_its_own(tmp_path):
    page = tmp_path / "report.html"
    result = run("uni", "--json", "--html", str(page))
    document = json.loads(result.stdout)
    assert document["conformant"], document["reasons"]
    assert result.return_value == 0
    assert (document["plugin"], document["kind"], document["api"]) == ("uni", "executor", "2.0")
    assert document["distribution"] == "hardpoint-uniproc"
    assert document["version"] == version("hardpoint-uniproc")
    assert document["kit"] == version("hardpoint-conformance")
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", document["time"])
    assert {each["suite"] for each in document["results"]} == {"plugin", "executor"}
    assert document["machine"]["cores"]
    text = page.read_text()
    assert "executor uni" in text
    assert "conformant" in text
    assert "http" not in text.replace("http-equiv", ""), "the page needs nothing else"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("duny",), "no platform or executor 'duny' is installed. Did you mean 'dummy'?"),
        (("dummy", "--executor", "um"), "no executor 'um' is installed"),
        (("dummy", "--set", "nonsense"), "must be KEY=VALUE"),
        (("dummy", "--html", "/no/such/folder/x.html"), "there is no folder /no/such/folder"),
    ],
)
def test_a_usage_error_is_one_and_runs_nothing(arguments, message):
    result = run(*arguments)
    assert message in str(result.exception)
    assert result.exception.exit_code == 2


@pytest.fixture
def failed():
    result = {
        "suite": "worker", "test": "test_sleep[<b>]", "outcome": "failed", "capability": None,
        "executor": "", "seconds": 0.1, "message": "\n  the contract says: <script>",
    }  # fmt: skip
    return {
        "plugin": "acme", "kind": "platform", "distribution": "hardpoint-acme", "version": "1",
        "api": "2.0", "kit": "0.1.0", "core": "0.1.0", "core_api": "2.0", "machine": {"cores": "2"},
        "time": "t", "seconds": 1.0, "executors": ["uni"], "settings": {"k": "v"}, "probe": "p",
        "oracle": "o", "results": [result], "interventions": ["overridden: A.b"],
        "reasons": ["1 test failed"], "conformant": False, "unseen": ["KV <connectors>: untested"],
        "capabilities": [
            {"name": "sleep", "declared": "not yet", "since": "2.0", "verdict": "xfail",
             "outcomes": {"not yet": 1}}
        ],
    }  # fmt: skip


def test_a_plugin_that_fails_ends_with_one_and_says_what(monkeypatch, failed):
    monkeypatch.setattr(certification, "certified", lambda *_, **__: failed)
    result = run("dummy")
    assert result.return_value == 1
    assert "NOT conformant: 1 test failed" in result.output
    assert "the contract says: <script>" in result.output
    assert "overridden: A.b" in result.output
    assert "not yet" in result.output
    assert "not certified:\n    KV <connectors>: untested" in result.output


def test_a_page_shows_what_failed_and_runs_no_text(failed):
    text = page_of(failed)
    assert "not conformant" in text
    assert "&lt;script&gt;" in text
    assert "<script" not in text
    assert "KV &lt;connectors&gt;: untested" in text
    assert "overridden: A.b" in text


PLUGIN = """
import sys
{first}
from hardpoint.hookspecs import hookimpl
from hardpoint.records import ExecutorRecord

@hookimpl
def hardpoint_executor():
    executor = "hardpoint_uniproc.executor:UniProcExecutor"
    return ExecutorRecord(name="odd", api=(2, 0), executor=executor, summary="odd")
"""
PROBE = "import pytest\nfrom hardpoint_conformance import Probe\n{first}\nclass Odd(Probe): ...\n"
IN_THE_TESTS = "if any('test_certification' in name for name in sys.modules): "


@pytest.mark.parametrize(
    ("plugin", "probe", "message"),
    [
        ("raise RuntimeError('no')", "", "cannot be used: RuntimeError: no"),
        ("sys.exit(0)", "", "cannot be used: SystemExit: 0"),
        ("import os; os._exit(0)", "", "it ended before it had answered"),
        (IN_THE_TESTS + "raise RuntimeError('no')", "", "cannot be used: RuntimeError: no"),
        (IN_THE_TESTS + "import os; os._exit(0)", "", "did not run"),
        ("", "raise RuntimeError('no')", "odd_probe:Odd in hardpoint.conformance cannot be loaded"),
        ("", "pytest.exit('enough', 0)", "cannot be loaded: Exit: enough"),
    ],
    ids=["raises", "exits", "ends", "raises later", "ends later", "probe raises", "probe exits"],
)
def test_what_cannot_be_certified_does_not_end_with_zero(tmp_path, plugin, probe, message):
    """One sentence or pytest's own words, whenever it happens; never a certificate."""
    done = certify_odd(tmp_path, plugin, probe)
    assert done.returncode in (1, 2), done.stdout
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_a_plugin_that_is_not_conformant_ends_the_process_with_one(tmp_path):
    """It serves; its distribution does not say which hardpoint it needs."""
    done = certify_odd(tmp_path, "", "", "--html", "report.html")
    assert done.returncode == 1, done.stderr
    assert "a plugin's distribution requires hardpoint" in done.stdout
    assert done.stdout.splitlines()[-1] == "NOT conformant: 1 test failed"
    assert "not conformant" in (tmp_path / "report.html").read_text()


def certify_odd(folder, plugin, probe, *options):
    """Install the executor ``odd`` and its probe, and run the command in a process of its own."""
    (folder / "odd_plugin.py").write_text(PLUGIN.format(first=plugin))
    (folder / "odd_probe.py").write_text(PROBE.format(first=probe))
    info = folder / "hardpoint_odd-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hardpoint-odd\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[hardpoint.executors]\nodd = odd_plugin\n[hardpoint.conformance]\nodd = odd_probe:Odd\n"
    )
    command = [sys.executable, "-c", "from hardpoint.cli import main; main()", "conformance", "odd"]
    return subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=300, check=False, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )  # fmt: skip
