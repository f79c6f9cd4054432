"""Names that a new plugin cannot have are refused, with the reason and a way out."""

from __future__ import annotations

import keyword
import sys

import pytest
from hardpoint_scaffold import names
from hardpoint_scaffold.errors import PluginNameError
from hardpoint_scaffold.names import LONGEST, checked_names


@pytest.mark.parametrize(
    ("name", "distribution", "package", "prefix"),
    [
        ("umbra", "hardpoint-umbra", "hardpoint_umbra", "Umbra"),
        ("umbra-mp", "hardpoint-umbra-mp", "hardpoint_umbra_mp", "UmbraMp"),
        ("umbra_mp2", "hardpoint-umbra_mp2", "hardpoint_umbra_mp2", "UmbraMp2"),
        ("a", "hardpoint-a", "hardpoint_a", "A"),
        ("x" * LONGEST, "hardpoint-" + "x" * LONGEST, "hardpoint_" + "x" * LONGEST, None),
    ],
)
def test_the_names_that_follow(name, distribution, package, prefix):
    found = checked_names("platform", name)
    assert (found.distribution, found.package) == (distribution, package)
    assert prefix in (None, found.prefix)
    assert found.prefix.isidentifier()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Acme", "Did you mean 'acme'?"),
        ("AcmeMp", "Did you mean 'acme-mp'?"),
        ("hardpoint-Acme", "Did you mean 'acme'?"),
        ("acme.mp", "Did you mean 'acme-mp'?"),
        ("acme--mp", "Did you mean 'acme-mp'?"),
        ("-acme", "Did you mean 'acme'?"),
        ("acme-", "Did you mean 'acme'?"),
        ("2fast", "begins with a letter"),
        ("", "lower-case letters"),
        (" acme", "Did you mean 'acme'?"),
        ("acme\n", "Did you mean 'acme'?"),
        ("../acme", "Did you mean 'acme'?"),
        ("/tmp/acme", "Did you mean 'tmp-acme'?"),
        ("äcme", "lower-case letters"),
        ("acme\0", "Did you mean 'acme'?"),
        ("{{ name }}", "Did you mean 'name'?"),
        ("x" * (LONGEST + 1), f"{LONGEST} are the most"),
        ("class", "keyword"),
        ("match", "keyword"),
        ("json", "'json-unit'"),
        ("async", "keyword"),
        ("any", "good for every platform"),
        ("auto", "leaves the choice"),
        ("none", "no value"),
        ("disable", "plugins.disable"),
        ("provider", "plugins.provider"),
        ("hardpoint", "Hardpoint itself"),
        ("cuda", "hardpoint-cuda"),
        ("mp", "hardpoint-multiproc"),
        ("ray-legacy", "hardpoint-ray"),
        ("engine", "hardpoint-engine"),
        ("conformance", "hardpoint-conformance"),
    ],
)
def test_a_name_that_cannot_be(name, words):
    with pytest.raises(PluginNameError) as caught:
        checked_names("platform", name)
    assert repr(name) in str(caught.value)
    assert words in str(caught.value)


def test_every_keyword_and_every_module_of_the_standard_library_is_refused():
    for name in {*keyword.kwlist, *keyword.softkwlist, *sys.stdlib_module_names} - {"this"}:
        with pytest.raises(PluginNameError):
            checked_names("executor", name)
    with pytest.raises(PluginNameError, match="'json-workers'"):
        checked_names("executor", "json")


def installed(folder, distribution, entry_points=""):
    info = folder / f"{distribution.replace('-', '_')}-3.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 3.1\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.mark.parametrize("kind", ["platform", "executor"])
@pytest.mark.parametrize("taken", ["platforms", "executors", "extensions", "commands"])
def test_a_plugin_of_any_kind_has_the_name_already(kind, taken, tmp_path, monkeypatch):
    installed(tmp_path, "zork-units", f"[hardpoint.{taken}]\nzork_two = zork.plugin\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginNameError, match=rf"{taken[:-1]} 'zork_two' of zork-units 3\.1"):
        checked_names(kind, "zork-two")
    assert checked_names(kind, "zork").name == "zork"


def test_a_distribution_has_the_name_already(tmp_path, monkeypatch):
    installed(tmp_path, "Hardpoint.Zork")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginNameError, match=r"distribution hardpoint-zork 3\.1 is installed"):
        checked_names("platform", "zork")


def test_a_package_has_the_name_already(tmp_path, monkeypatch):
    (tmp_path / "hardpoint_zork").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginNameError, match="package hardpoint_zork"):
        checked_names("platform", "zork")
    assert "hardpoint_zork" not in sys.modules


def test_our_own_plugins_are_reserved_whether_they_are_installed_or_not(monkeypatch):
    monkeypatch.setattr(names.discovery, "find", lambda: ())
    for name in ("cpu", "dummy", "rocm", "uni", "mp", "ray", "external_launcher", "multiproc"):
        with pytest.raises(PluginNameError, match="reserved for hardpoint-"):
            checked_names("platform", name)
