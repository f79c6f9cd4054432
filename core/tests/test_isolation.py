"""What a plugin does that is no error of ours: it exits, prints, hangs, or answers nonsense."""

from __future__ import annotations

import logging
import sys
import threading
import time
from concurrent.futures import wait

import pytest
from hardpoint import isolation
from hardpoint.config.loading import load_config
from hardpoint.errors import NoPlatformError, PluginLoadError
from hardpoint.isolation import LONGEST_TEXT, clipped, ended_within, prints_diverted
from hardpoint.references import UnresolvedReferenceError, resolve
from hardpoint.registry import Registry
from hardpoint.selection import explain_selection, select_platform

EXITS = ["raise SystemExit(6)", "raise BaseException('6')", "raise GeneratorExit(6)"]
HANG = "import threading; threading.Event().wait()"


def start(site, **overrides):
    config = load_config(overrides=overrides, environ={})
    registry = Registry.discover(config, path=site.path)
    return registry, config, select_platform(registry, config)


# It exits.


@pytest.mark.parametrize("line", EXITS)
def test_an_extension_that_exits_in_a_hook_is_named_with_the_hook_and_the_cause(site, line):
    site.platform("acme")
    hook = f"@hookimpl\ndef hardpoint_configure(config):\n    {line}"
    site.plugin("extension", "leaver", source=hook, version="4.2")
    registry, config, platform = start(site, platform="acme")
    with pytest.raises(PluginLoadError, match=r"hp-leaver 4\.2.*hardpoint_configure raised.*6"):
        registry.configure(config, platform)


@pytest.mark.parametrize("line", [*EXITS, "raise ValueError(6)"])
def test_a_chosen_plugin_that_exits_when_asked_for_its_worker_is_named(site, line):
    site.platform("acme", source=f"@hookimpl\ndef hardpoint_worker():\n    {line}")
    registry, config, platform = start(site, platform="acme")
    with pytest.raises(PluginLoadError, match=r"hp-acme.*hardpoint_worker raised.*6"):
        registry.worker_class(config, platform)


@pytest.mark.parametrize("line", EXITS)
@pytest.mark.parametrize("place", ["plugin", "platform", "probe"])
def test_a_platform_that_exits_is_told_and_raised_when_named(site, place, line):
    site.platform("good")
    package = site.platform("acme", priority=100, probe=line)
    if place != "probe":
        site.module(f"{package}.{place}", line)
    assert start(site)[2].name == "good"
    with pytest.raises(PluginLoadError, match=r"hp-acme.*6"):
        start(site, platform="acme")


def test_a_listener_that_exits_is_logged_once(site, caplog):
    hook = "@hookimpl\ndef hardpoint_worker_closing(worker):\n    raise SystemExit(6)"
    site.plugin("extension", "leaver", source=hook)
    registry = Registry.discover(path=site.path)
    for _ in range(2):
        registry.announce("hardpoint_worker_closing", worker=None)
    assert caplog.text.count("said once") == 1


@pytest.mark.parametrize("line", EXITS)
def test_a_reference_into_a_module_that_exits_is_unresolved(site, line):
    site.module("leaver", line)
    site.module("lazy", f"def __getattr__(name):\n    {line}")
    for reference in ("leaver:X", "lazy:X"):
        with pytest.raises(UnresolvedReferenceError, match=f"{reference}.*raised.*6"):
            resolve(reference)


def test_ctrl_c_is_nobodys_failure(site):
    site.platform("acme", source="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        start(site)


# It prints.


def test_what_plugins_print_goes_to_standard_error(site, capsys):
    said = "print('noise')"
    package = site.platform(
        "acme",
        probe=said,
        more=f"def __init__(self, settings):\n    {said}",
        source=f"{said}\n@hookimpl\ndef hardpoint_configure(config):\n    {said}\n    return []",
    )
    site.plugin("extension", "loud", source=said)
    with (site.folder / package / "platform.py").open("a") as file:
        file.write(f"\n{said}\n")
    registry, config, platform = start(site, platform="acme")
    registry.configure(config, platform)
    print("answer")
    out, err = capsys.readouterr()
    assert out == "answer\n"
    assert err.count("noise") == 6


def test_a_diversion_ends_with_its_last_user():
    before, inside, leave = sys.stdout, threading.Event(), threading.Event()

    def divert():
        with prints_diverted():
            inside.set()
            leave.wait(60)

    other = threading.Thread(target=divert)
    with prints_diverted():
        other.start()
        inside.wait(60)
    assert sys.stdout is sys.stderr
    leave.set()
    other.join()
    assert sys.stdout is before


# It hangs, or is slow.


def test_a_probe_that_does_not_end_is_not_waited_for(site):
    site.platform("good")
    site.platform("acme", priority=100, probe=HANG)
    began = time.monotonic()
    registry, config, platform = start(site)
    assert platform.name == "good"
    verdict = dict(explain_selection(registry, config))["acme"]
    assert time.monotonic() - began < 60  # once 1 s, and a slow machine
    assert (verdict.available, verdict.reason) == (False, "its probe did not end within 1 s")
    with pytest.raises(NoPlatformError, match="its probe did not end within 1 s"):
        start(site, platform="acme")


def test_a_busy_machine_makes_no_probe_late(monkeypatch):
    """It wakes whoever waits long after the moment that was asked for, as it does the probe."""
    wakings, turn = [], threading.Event()

    def woken_late(futures, seconds):
        wakings.append(seconds)
        if len(wakings) == 10:
            turn.set()
            return wait(futures, 60)
        return wait(futures, 0)

    monkeypatch.setattr(isolation, "wait", woken_late)
    assert ended_within(1.0, turn.wait).result() is True
    assert sum(wakings) < 0.5


def test_a_slow_probe_is_told(site, caplog):
    site.platform("acme", probe="import time; time.sleep(0.25)")
    assert start(site)[2].name == "acme"
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "the probe of platform 'acme' of hp-acme" in record.getMessage()


# It answers nonsense.


@pytest.mark.parametrize("priority", [float("nan"), float("inf"), 1.5, "5", None, True])
def test_a_priority_is_a_whole_number(site, priority):
    shown = f"float({str(priority)!r})" if isinstance(priority, float) else repr(priority)
    package = site.platform("acme")
    file = site.folder / package / "platform.py"
    file.write_text(file.read_text().replace("priority=0", f"priority={shown}"))
    with pytest.raises(PluginLoadError, match=r"hp-acme.*whole number"):
        start(site, platform="acme")


def test_a_malformed_requirement_is_told_in_one_line(site):
    site.plugin("extension", "acme", requires=("hardpoint>>=xx",))
    registry = Registry.discover(path=site.path)
    registry.extensions()
    (plugin,) = registry.plugins
    assert plugin.state == "refused"
    assert "hardpoint>>=xx" in plugin.reason
    assert "\n" not in plugin.reason


def test_an_error_without_a_text_is_told_all_the_same(site):
    source = "class Mute(Exception):\n    def __str__(self): raise SystemExit\nraise Mute"
    site.plugin("extension", "acme", source=source)
    registry = Registry.discover(path=site.path)
    with pytest.raises(PluginLoadError, match="Mute: <its __str__ raised SystemExit>"):
        registry.load("extension", "acme")


def test_a_text_is_cut_in_its_middle():
    assert clipped("x" * LONGEST_TEXT) == "x" * LONGEST_TEXT
    text = clipped("a" * LONGEST_TEXT + "b" * LONGEST_TEXT)
    assert (text[0], text[-1]) == ("a", "b")
    assert f"[{LONGEST_TEXT} characters are cut here" in text


def test_where_an_error_was_raised(tmp_path, monkeypatch):
    (tmp_path / "places_a.py").write_text("\nimport places_b\n")
    (tmp_path / "places_b.py").write_text("\n\nint('x')\n")
    (tmp_path / "places_c.py").write_text("def (\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def reason(name):
        with pytest.raises(UnresolvedReferenceError) as caught:
            resolve(f"{name}:thing")
        return str(caught.value)

    assert reason("places_a").endswith("'x' (places_b.py, line 3)")
    assert reason("places_c").count("places_c.py, line 1") == 1
    assert reason("places_d").endswith("No module named 'places_d'")
