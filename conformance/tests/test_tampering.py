"""A plugin cannot switch off, skip or override a test without the certificate saying so."""

from __future__ import annotations

import json

import hardpoint_conformance.plugin_suite
import hardpoint_conformance.running
import pytest
from hardpoint_dummy.platform import DummyPlatform

ADOPTED = "from hardpoint_conformance import PluginSuite\nTestPlugin = PluginSuite.of('dummy')\n"
QUICK = "test_only_one_distribution_claims_the_name"
LOADED = (hardpoint_conformance.plugin_suite, hardpoint_conformance.running)
"""Imported before the runs below, which forget their imports: numpy can be loaded only once."""
LIGHT = "test_the_entry_point_leads_to_a_record_of_its_name"


@pytest.fixture
def certificate(pytester, monkeypatch):
    """Run a module (and a conftest) and return its certificate; only the quick tests."""

    def run(module, conftest="", *options):
        pytester.makepyfile(test_it=module)
        pytester.makeconftest(conftest)
        arguments = ("-p", "no:cacheprovider", "--hardpoint-certificate", "c.json", *options)
        if "PluginSuite." + QUICK in module:  # it changes the kit itself
            monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
            pytester.runpytest_subprocess("-p", "hardpoint_conformance.pytest_plugin", *arguments)
        else:
            pytester.runpytest_inprocess(*arguments)
        (document,) = json.loads((pytester.path / "c.json").read_text())["certificates"]
        return document

    return run


def outcome(document, test):
    return next(each["outcome"] for each in document["results"] if each["test"] == test)


def test_what_is_deselected_did_not_run(certificate):
    document = certificate(ADOPTED, "", "-k", f"{QUICK} or {LIGHT}")
    assert outcome(document, QUICK) == "passed"
    assert outcome(document, "test_the_verdict_is_pure") == "not run"
    assert not document["conformant"]
    assert "suite 'worker' was not adopted" in document["reasons"]


def test_what_is_not_tested_and_what_cannot_be_seen_is_said(certificate):
    told = certificate(ADOPTED, "", "-k", QUICK)["unseen"]
    assert any(line.startswith("KV connectors: no part of contract 2.0") for line in told)
    assert not any("device memory" in line for line in told)
    blind = ADOPTED.replace("PluginSuite\n", "PluginSuite, Probe\n").replace(
        "'dummy'", "'dummy', probe=Probe"
    )
    told = certificate(blind, "", "-k", QUICK)["unseen"]
    assert any(line.startswith("device memory") and "untested" in line for line in told)
    settings = "test_settings_are_a_frozen_record_whose_keys_have_defaults_and_help"
    told = certificate(ADOPTED.replace("dummy", "uni"), "", "-k", settings)["unseen"]
    assert told == [f"plugin: {settings}: not applicable: it declares no settings"]


def test_a_plugin_that_skips_a_test_is_told(certificate, monkeypatch):
    def limits(self, config):
        pytest.skip("not applicable: never mind")

    monkeypatch.setattr(DummyPlatform, "limits", limits)
    name = "test_limits_can_be_asked_before_anything_is_known"
    document = certificate(ADOPTED.replace("PluginSuite", "PlatformSuite"), "", "-k", name)
    assert outcome(document, name) == "not run"
    assert not document["conformant"]


@pytest.mark.parametrize(
    "conftest",
    [
        "def pytest_runtest_setup(item):\n    import pytest\n    pytest.skip('never mind')",
        "def pytest_pyfunc_call(pyfuncitem):\n    return True",
        "import pytest\n@pytest.fixture(autouse=True)\ndef off():\n    pytest.skip('never mind')",
        "def pytest_collection_modifyitems(items):\n    items.clear()",
    ],
    ids=["hook that skips", "hook that takes the call", "fixture that skips", "hook that drops"],
)
def test_a_conftest_that_keeps_tests_from_running_is_told(certificate, conftest):
    if "pyfunc_call" in conftest:
        conftest = "import pytest\n@pytest.hookimpl(tryfirst=True)\n" + conftest
    document = certificate(ADOPTED, conftest, "-k", f"{QUICK} or {LIGHT}")
    assert outcome(document, QUICK) == outcome(document, LIGHT) == "not run"
    assert not document["conformant"]
    if "def pytest_" in conftest:
        assert any("conftest" in each for each in document["interventions"])


def test_a_suite_that_is_adopted_twice_answers_for_both(certificate):
    """What is left out of one is told, and so are the settings and the probe of each."""
    module = ADOPTED + (
        "import pytest\n"
        "from hardpoint_conformance.dummy_probe import DummyProbe\n"
        "class Kind(DummyProbe):\n    logit_tolerance = 0.5\n"
        "settings = {'plugins.dummy.num_devices': 2}\n"
        "class TestSecond(PluginSuite.of('dummy', settings=settings, probe=Kind)):\n"
        "    pytestmark = pytest.mark.skip('no')\n"
    )
    document = certificate(module, "", "-k", QUICK)
    outcomes = [each["outcome"] for each in document["results"] if each["test"] == QUICK]
    assert outcomes == ["passed", "not run"]
    assert document["settings"]["plugins.dummy.num_devices"] == "unset or 2"
    assert document["probe"].endswith("test_it:Kind (logit_tolerance 0.5)")


@pytest.mark.parametrize(
    ("name", "suites"),
    [
        ("dummy", ("PlatformSuite", "WorkerSuite", "ModelRunnerSuite")),
        ("uni", ("ExecutorSuite",)),
    ],
)
def test_the_suites_of_a_plugin_have_one_certificate(certificate, name, suites):
    lines = [f"from hardpoint_conformance import PluginSuite, {', '.join(suites)}"]
    lines += [f"Test{each} = {each}.of({name!r})" for each in ("PluginSuite", *suites)]
    document = certificate("\n".join(lines), "", "-k", QUICK)
    assert outcome(document, QUICK) == "passed"
    assert not [each for each in document["reasons"] if "was not adopted" in each]


def test_an_overridden_test_is_told(certificate):
    module = (
        "from hardpoint_conformance import PluginSuite\n"
        f"class TestPlugin(PluginSuite.of('dummy')):\n    def {QUICK}(self):\n        pass\n"
    )
    document = certificate(module, "", "-k", QUICK)
    assert f"overridden: TestPlugin.{QUICK}" in document["reasons"]


def test_a_package_that_is_called_like_the_kit_is_not_the_kit(certificate, pytester):
    own = f"class Mine(PluginSuite.of('dummy')):\n    def {QUICK}(self):\n        pass\n"
    own = "from hardpoint_conformance import PluginSuite\n" + own + "Mine.__test__ = True\n"
    pytester.makepyfile(hardpoint_conformance_acme=own)
    pytester.syspathinsert()
    module = "from hardpoint_conformance_acme import Mine\nclass TestPlugin(Mine):\n    pass\n"
    document = certificate(module, "", "-k", QUICK)
    assert f"overridden: Mine.{QUICK}" in document["reasons"]


def test_a_hidden_test_is_told(certificate):
    module = (
        "from hardpoint_conformance import PluginSuite\n"
        f"class TestPlugin(PluginSuite.of('dummy')):\n    {QUICK} = None\n"
    )
    document = certificate(module, "", "-k", LIGHT)
    assert outcome(document, QUICK) == "not run"
    assert f"overridden: TestPlugin.{QUICK}" in document["reasons"]


def test_a_test_that_is_replaced_or_marked_from_outside_is_told(certificate):
    module = ADOPTED + (
        f"PluginSuite.{QUICK} = lambda self: None\n"
        "import pytest\n"
        f"pytest.mark.skip('no')(PluginSuite.{LIGHT})\n"
    )
    document = certificate(module, "", "-k", f"{QUICK} or {LIGHT}")
    assert any(QUICK in each and "from outside" in each for each in document["reasons"])
    assert any(LIGHT in each and "from outside" in each for each in document["reasons"])
    assert outcome(document, LIGHT) == "not run"


def test_a_certificate_with_tests_in_other_processes_is_refused(pytester):
    pytester.makepyfile(test_it=ADOPTED)
    result = pytester.runpytest_subprocess("-n", "1", "--hardpoint-certificate", "c.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*needs all tests in one process*"])
