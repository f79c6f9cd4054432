"""Finding what is installed, judging it, loading one of it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import hardpoint
import pytest
from hardpoint import discovery
from hardpoint.errors import IncompatiblePluginError


def only(site):
    (found,) = discovery.find(site.path)
    (plugin,) = discovery.judge([found])
    return plugin


# Finding.


def test_find_reads_metadata_and_imports_nothing(site):
    site.platform("acme", requires=("hardpoint>=0.1", "attrs"), version="1.2")
    site.add("bystander", entry_points="[console_scripts]\nx = bystander:main\n")
    (found,) = discovery.find(site.path)
    assert (found.kind, found.name, found.entry_point) == ("platform", "acme", "hp_acme.plugin")
    assert (found.distribution, found.version) == ("hp-acme", "1.2")
    assert found.requires == ("hardpoint>=0.1", "attrs")
    assert not [name for name in sys.modules if name.startswith(("hp_acme", "bystander"))]


def test_order_does_not_depend_on_the_folder(site):
    names = ["zeta", "alpha", "mid"]
    for name in names:
        site.plugin("extension", name)
    site.platform("omega")
    assert [each.name for each in discovery.find(site.path)] == ["omega", *sorted(names)]


def test_a_package_installed_a_moment_ago_is_seen_and_can_be_imported(site):
    """Even within one tick of the file system's clock, by which Python's own caches are kept."""
    site.plugin("extension", "first")
    discovery.find(site.path)
    discovery.load(only(site))
    before = site.folder.stat()
    site.plugin("extension", "second")
    os.utime(site.folder, ns=(before.st_atime_ns, before.st_mtime_ns))
    newest = discovery.judge(discovery.find(site.path))[-1]
    assert newest.name == "second"
    assert discovery.load(newest).state == "loaded"


def test_listing_300_distributions_imports_nothing_and_writes_nothing(site, tmp_path):
    for index in range(150):
        site.plugin("extension", f"e{index:03}")
        site.add(f"other{index}", entry_points="[console_scripts]\nx = y:z\n")
    code = f"""
        import sys
        from hardpoint.config import Config
        from hardpoint.registry import Registry
        written, read = [], []
        def audit(event, arguments):
            if event == "open":
                flags = arguments[2] if isinstance(arguments[2], int) else 0
                mode = arguments[1]
                writes = flags & 3 or (isinstance(mode, str) and set(mode) & set("wax+"))
                (written if writes else read).append(str(arguments[0]))
            if event in ("os.mkdir", "os.rename", "os.remove", "os.symlink"):
                written.append(event)
        sys.addaudithook(audit)
        registry = Registry.discover(Config(), path={site.path!r})
        names = registry.names("extension")
        assert len(names) == 150 and names[7] == "e007", names
        assert not written, written
        ours = [m for m in sys.modules if m.startswith("hp_") or m.startswith("other")]
        assert not ours, ours
        inside = [file for file in read if {str(site.folder)!r} in file]
        assert len(inside) <= 300 + 150, len(inside)
        assert {{file.rsplit("/", 1)[1] for file in inside}} == {{"entry_points.txt", "METADATA"}}
        """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert not [path for path in site.folder.rglob("*") if "__pycache__" in path.parts]


def test_the_same_entry_point_found_twice_is_one(site):
    site.platform("acme")
    egg = site.folder / "hp_acme.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: hp_acme\nVersion: 1.0\n")
    (egg / "entry_points.txt").write_text("[hardpoint.platforms]\nacme = hp_acme.plugin\n")
    found = discovery.find([*site.path, *site.path])
    assert len(found) == 1
    assert discovery.judge(found)[0].state == "found"


def test_a_shadowed_distribution_does_not_count(site, tmp_path):
    older = type(site)(tmp_path / "older")
    older.plugin("extension", "acme", version="0.9")
    older.plugin("extension", "gone", distribution="hp-acme2")
    site.plugin("extension", "acme", version="1.0")
    site.add("HP_Acme2", "2.0")
    both = discovery.find([*site.path, *older.path])
    assert [(each.name, each.version) for each in both] == [("acme", "1.0")]


def test_an_egg_info_folder_is_read(site):
    egg = site.folder / "old_style.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text("Metadata-Version: 1.0\nName: old-style\nVersion: 3\n\n")
    (egg / "requires.txt").write_text("hardpoint>=7\n")
    (egg / "entry_points.txt").write_text("[hardpoint.extensions]\nold = old_style\n")
    (found,) = discovery.find(site.path)
    assert (found.distribution, found.version, found.requires) == (
        "old-style",
        "3",
        ("hardpoint>=7",),
    )


@pytest.mark.parametrize("damage", ["absent", "empty", "binary"])
def test_broken_metadata_does_not_hide_the_others(site, damage):
    site.plugin("extension", "good")
    info = site.add("bad", entry_points={"extension": {"bad": "bad.plugin"}})
    metadata = info / "METADATA"
    metadata.unlink() if damage == "absent" else metadata.write_bytes(
        b"\xff\xfe" * (damage == "binary")
    )
    names = {each.name: each for each in discovery.find(site.path)}
    assert set(names) == {"good", "bad"}
    assert names["bad"].version == "(no version)"


def test_unreadable_entry_points_are_told(site, caplog):
    site.plugin("extension", "good")
    info = site.add("bad")
    (info / "entry_points.txt").write_bytes(b"[hardpoint.extensions]\nbad = \xff\xfe\n")
    assert [each.name for each in discovery.find(site.path)] == ["good"]
    assert "unreadable entry points" in caplog.text


def test_broken_lines_become_plugins_that_fail_by_name(site):
    text = "[hardpoint.extensions]\n# a comment\n\nlonely\nodd = not a module!\n[other]\nx = y\n"
    site.add("bad", entry_points=text)
    plugins = discovery.judge(discovery.find(site.path))
    assert [plugin.name for plugin in plugins] == ["lonely", "odd"]
    for plugin in plugins:
        loaded = discovery.load(plugin)
        assert loaded.state == "failed"
        assert isinstance(loaded.error, ImportError)


def test_extras_of_an_entry_point_are_not_part_of_the_module(site):
    site.add("old-habit", entry_points="[hardpoint.extensions]\nx = some.plugin [fast,more]\n")
    assert discovery.find(site.path)[0].entry_point == "some.plugin"


# Judging.


def test_two_distributions_that_claim_one_name_are_in_conflict(site):
    site.platform("acme", distribution="first", version="1.1")
    site.platform("acme", distribution="second", version="2.2")
    plugins = discovery.judge(discovery.find(site.path))
    assert [plugin.state for plugin in plugins] == ["conflict", "conflict"]
    for text in ("first 1.1", "second 2.2", "plugins.provider.acme"):
        assert text in plugins[0].reason


def test_the_configuration_may_say_who_provides(site):
    site.platform("acme", distribution="first.one")
    site.platform("acme", distribution="second")
    plugins = discovery.judge(discovery.find(site.path), provider={"acme": "First_One"})
    states = {plugin.distribution: plugin.state for plugin in plugins}
    assert states == {"first.one": "found", "second": "disabled"}


def test_one_name_in_two_kinds_is_no_conflict(site):
    site.platform("acme", distribution="first")
    site.plugin("extension", "acme", distribution="second")
    assert {p.state for p in discovery.judge(discovery.find(site.path))} == {"found"}


def test_one_distribution_that_names_two_modules_is_in_conflict_with_itself(site):
    text = "[hardpoint.extensions]\nx = one\nx = two\n"
    site.add("twofold", entry_points=text)
    plugins = discovery.judge(discovery.find(site.path), provider={"x": "twofold"})
    assert [plugin.state for plugin in plugins] == ["conflict", "conflict"]
    assert "one" in plugins[0].reason
    assert "two" in plugins[0].reason


def test_disabled_plugins_stay_in_the_list(site):
    site.plugin("extension", "acme")
    (plugin,) = discovery.judge(discovery.find(site.path), disable=["acme"])
    assert (plugin.state, plugin.reason) == ("disabled", "named in plugins.disable")


# Versions.


@pytest.mark.parametrize(
    ("requirement", "accepted"),
    [
        ("hardpoint>=0.1", True),
        (f"hardpoint=={hardpoint.__version__}", True),
        ("hardpoint (>=0.1)", True),
        ("Hardpoint>=99", False),
        ("hardpoint<0.1", False),
        ("hardpoint[cpu]>=99", False),
        ("hardpoint>=99; extra == 'later'", True),
        ("hardpoint>=99; python_version < '3'", True),
        ("hardpoint>=99; python_version >= '3'", False),
        ("hardpoint-runtime>=99", True),
        ("hardpoint==", False),
    ],
)
def test_requires_dist_is_checked_before_import(site, requirement, accepted):
    package = site.plugin("extension", "acme", requires=("attrs", requirement))
    loaded = discovery.load(only(site))
    assert loaded.state == ("loaded" if accepted else "refused")
    assert (f"{package}.plugin" in sys.modules) is accepted
    if not accepted:
        assert isinstance(loaded.error, IncompatiblePluginError)
        assert "hp-acme 1.0" in loaded.reason


def test_a_refusal_by_distribution_has_both_versions(site):
    site.plugin("extension", "acme", requires=("hardpoint<9,>=7",))
    reason = discovery.load(only(site)).reason
    assert "hardpoint<9,>=7" in reason
    assert f"hardpoint {hardpoint.__version__}" in reason


@pytest.mark.parametrize(
    ("api", "served"),
    [
        ((1, 0), True),
        ((1, 9), True),
        ((2, 0), True),
        ((2, 1), False),
        ((3, 0), False),
        ((0, 9), False),
    ],
)
def test_a_core_serves_its_major_number_and_the_one_before(site, api, served):
    site.plugin("extension", "acme", api=api)
    loaded = discovery.load(only(site))
    assert loaded.state == ("loaded" if served else "refused")
    if not served:
        assert f"plugin API {api[0]}.{api[1]}, core API 2.0" in loaded.reason
        assert "hp-acme 1.0" in loaded.reason


def test_the_number_is_checked_before_any_other_hook_is_looked_at(site):
    site.plugin(
        "extension", "acme", api=(3, 0), source="@hookimpl\ndef hardpoint_of_tomorrow(): pass\n"
    )
    assert discovery.load(only(site)).state == "refused"


# Shape.

HOOK = "@hookimpl\ndef hardpoint_extension():\n    return "
RECORD = 'return ExtensionRecord(name="acme", api=(2, 0))'


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("raise ImportError('libacme.so')", ImportError, "libacme.so"),
        ("def (", SyntaxError, "SyntaxError"),
        ("import sys; sys.exit(3)", SystemExit, "SystemExit: 3"),
        ("x = 1", TypeError, "hardpoint_extension"),
        (f"def hardpoint_extension():\n    {RECORD}", TypeError, "@hookimpl"),
        (HOOK + "{}", TypeError, "{}"),
        (HOOK + "None", TypeError, "nothing"),
        ("@hookimpl\ndef hardpoint_extension():\n    raise KeyError('k')", KeyError, "'k'"),
        (f"@hookimpl\ndef hardpoint_extension(config):\n    {RECORD}", Exception, "config"),
        (
            HOOK + "ExtensionRecord(name='x', api=(2, 0))",
            ValueError,
            "'x'",
        ),
        (
            HOOK + "ExtensionRecord(name='acme', api='2.0')",
            TypeError,
            "'2.0'",
        ),
        (
            HOOK + "ExtensionRecord(name='acme')",
            TypeError,
            "api",
        ),
    ],
)
def test_what_a_plugin_raises_and_what_is_misshapen_is_kept(site, source, error, words):
    prelude = "from hardpoint.hookspecs import hookimpl\nfrom hardpoint.records import *\n"
    site.add(
        "hp-acme",
        entry_points={"extension": {"acme": "acme_plugin"}},
        modules={"acme_plugin": prelude + source},
    )
    loaded = discovery.load(only(site))
    assert loaded.state == "failed"
    assert isinstance(loaded.error, error)
    assert words in loaded.reason


def test_an_interrupt_while_loading_is_not_the_plugins_failure(site):
    site.plugin("extension", "acme", source="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        discovery.load(only(site))


def test_an_entry_point_may_name_an_object(site):
    site.plugin(
        "extension",
        "acme",
        entry_point="hp_acme.plugin:holder",
        source="""
        class Holder:
            @hookimpl
            def hardpoint_extension(self):
                return ExtensionRecord(name="acme", api=(2, 0), summary="held")
        holder = Holder()
        """,
    )
    assert discovery.load(only(site)).record.summary == "held"
