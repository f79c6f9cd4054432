"""A hardware team's first afternoon: from wheels to a conformant plugin in four commands, with
nothing edited, in an environment that has nothing of this repository but the wheels.
"""

from __future__ import annotations

import json
import re
import resource

import pytest

KINDS = ("platform", "executor")
WHEELS = ("hardpoint-engine", "hardpoint-runtime", "hardpoint-scaffold", "hardpoint-conformance")


QUICK = ("-m", "not hardpoint_own_workers", "-k", "not TestModelRunner")
"""Of a platform's tests: the command has run them all."""

MACHINE_SECONDS = 180
"""Of processors, for both plugins; building our wheels apart, and what is run beside the path."""


def spent():
    """Return the seconds that processes which have ended computed for this one."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def succeeded(done):
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def newcomer(shared_environment):
    """The first two commands, for both kinds: install what there is, have a plugin written."""
    begun, shared_environment.beside = spent(), 0.0
    shared_environment.install(*WHEELS)
    for kind in KINDS:
        succeeded(shared_environment.hardpoint("new", kind, f"umbra-{kind}"))
    folders = [shared_environment.folder / f"hardpoint-umbra-{kind}" for kind in KINDS]
    # The third, with the build backend that is here: nothing is fetched.
    shared_environment.install(*(f"{folder}[test]" for folder in folders))
    yield shared_environment
    assert spent() - begun - shared_environment.beside < MACHINE_SECONDS


def test_the_plugins_are_found_and_used_by_name_only(newcomer):
    rows = json.loads(succeeded(newcomer.hardpoint("plugins", "--json")))["plugins"]
    found = {row["name"]: row["state"] for row in rows if "umbra" in row["name"]}
    assert found == {"umbra-platform": "loaded", "umbra-executor": "loaded"}
    told = succeeded(newcomer.hardpoint("doctor", "umbra-platform"))
    assert "the host's torch stands in for the device" in told
    chosen = newcomer.hardpoint("doctor", "--json")
    assert json.loads(chosen.stdout)["selected"].get("platform") != "umbra-platform"


def test_the_plugins_generate_text(newcomer):
    arguments = ("generate", "--platform", "umbra-platform", "--load-format", "dummy", "--raw")
    arguments += ("--json", "--max-tokens", "4", "--num-kv-blocks", "32", "one")
    tokens = []
    for executor in ("uni", "umbra-executor"):
        document = json.loads(succeeded(newcomer.hardpoint(*arguments, "--executor", executor)))
        assert (document["platform"], document["executor"]) == ("umbra-platform", executor)
        tokens.append(document["results"][0]["token_ids"])
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 4


def test_the_name_is_taken_now(newcomer):
    done = newcomer.hardpoint("new", "executor", "umbra-platform")
    assert done.returncode == 2
    assert "platform 'umbra-platform' of hardpoint-umbra-platform 0.1.0 is installed" in done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_the_plugin_is_conformant_as_it_was_written(newcomer, kind):
    """The fourth command."""
    done = newcomer.hardpoint("conformance", f"umbra-{kind}", "--json")
    succeeded(done)
    certificate = json.loads(done.stdout)
    assert certificate["conformant"] is True
    assert certificate["interventions"] == []


@pytest.mark.parametrize(("kind", "selected"), [("platform", QUICK), ("executor", ())])
def test_the_tests_that_come_with_it_pass(newcomer, kind, selected):
    """By ``pytest`` in the project's folder, with the options that it has there."""
    begun = spent()
    folder = newcomer.folder / f"hardpoint-umbra-{kind}"
    done = newcomer.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *selected, cwd=folder)
    newcomer.beside += spent() - begun
    assert re.search(r"\d\d passed", succeeded(done))
