"""Plugins' settings classes: strict reading, exact paths, everything wrong at once."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Literal

import pytest
from attrs import field, frozen
from hardpoint.config.schema import key
from hardpoint.config.values import Text
from hardpoint.errors import ConfigError, PluginError
from hardpoint.settings import changed_settings, settings_leaves, structure_settings
from hypothesis import given, settings
from hypothesis import strategies as st


class Mode(Enum):
    FAST = "fast"
    SAFE = "safe"


@frozen(kw_only=True)
class Pool:
    size: int = key(1, "how large", low=1)


@frozen(kw_only=True)
class Settings:
    owner: str = field(metadata={"help": "whose"})
    threads: int | None = key(None, "how many", low=1)
    share: float = key(0.5, "how much", above=0, high=1)
    pin: bool = key(True, "whether")
    names: tuple[str, ...] = key((), "which")
    sizes: tuple[int, ...] = key((), "which sizes", choices=(1, 2, 4))
    style: Literal["x", "y"] = key("x", "how")
    mode: Mode | None = field(default=None)
    pool: Pool = field(factory=Pool)
    weights: Mapping[str, float] = field(factory=dict)


NAMES = ["owner", "threads", "share", "pin", "names", "sizes", "style", "mode", "pool", "weights"]


def refused(raw, origins=None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        structure_settings(Settings, raw, "acme", origins)
    return [str(problem) for problem in caught.value.problems]


def test_python_values_and_texts_give_the_same_settings():
    given_values = {
        "owner": "me",
        "threads": 4,
        "share": 1,
        "pin": False,
        "names": ["a", "b"],
        "sizes": [1, 4],
        "mode": "safe",
        "pool": {"size": 3},
        "weights": {"w": 2},
    }
    texts = {
        "owner": Text("me"),
        "threads": Text("4"),
        "share": Text("1"),
        "pin": Text("no"),
        "names": Text("a,b"),
        "sizes": Text("1,4"),
        "mode": Text("safe"),
        "pool": {"size": Text("3")},
        "weights": {"w": Text("2")},
    }
    read = structure_settings(Settings, given_values, "acme")
    assert read == structure_settings(Settings, texts, "acme")
    assert read == Settings(
        owner="me",
        threads=4,
        share=1.0,
        pin=False,
        names=("a", "b"),
        sizes=(1, 4),
        mode=Mode.SAFE,
        pool=Pool(size=3),
        weights={"w": 2.0},
    )
    assert structure_settings(Settings, read, "acme") is read


def test_no_keys_are_the_defaults():
    assert structure_settings(Pool, None, "acme") == structure_settings(Pool, {}, "acme") == Pool()


def test_everything_wrong_is_told_with_its_path():
    raw = {
        "threads": "4",
        "share": 2.0,
        "pin": 1,
        "names": "ab",
        "sizes": [1, "x"],
        "style": "z",
        "mode": "slow",
        "pool": {"siz": 1},
        "weights": {"w": "q"},
        "thread": 3,
        "zzz": Text("1"),
    }
    assert set(refused(raw, {"plugins.acme.threads": "file F.toml"})) == {
        "plugins.acme.threads = '4' (file F.toml): must be a whole number.",
        "plugins.acme.share = 2.0: must be more than 0 and at most 1.",
        "plugins.acme.pin = 1: must be true or false.",
        "plugins.acme.names = 'ab': must be a list.",
        "plugins.acme.sizes.1 = 'x': must be a whole number.",
        "plugins.acme.style = 'z': must be one of x, y.",
        "plugins.acme.mode = 'slow': must be one of fast, safe.",
        "plugins.acme.pool.siz = 1: plugins.acme.pool has no such key. Did you mean size?",
        "plugins.acme.weights.w = 'q': must be a number.",
        "plugins.acme.owner = None: is required.",
        "plugins.acme.thread = 3: plugins.acme has no such key. Did you mean threads?",
        f"plugins.acme.zzz = '1': plugins.acme has no such key. Its keys are {', '.join(NAMES)}.",
    }


def test_values_out_of_range_are_told_with_their_path():
    raw = {"owner": "o", "threads": 0, "sizes": [1, 3], "pool": {"size": 0}}
    assert refused(raw) == [
        "plugins.acme.threads = 0: must be at least 1.",
        "plugins.acme.sizes = (1, 3): must be one of 1, 2, 4.",
        "plugins.acme.pool.size = 0: must be at least 1.",
    ]


@pytest.mark.parametrize("value", [3, "text", [1], True])
def test_a_value_where_a_table_belongs(value):
    assert refused(value) == [f"plugins.acme = {value!r}: must be a table of keys."]
    wrong = refused({"owner": "o", "pool": value, "weights": value})
    assert wrong == [
        f"plugins.acme.pool = {value!r}: must be a table of keys.",
        f"plugins.acme.weights = {value!r}: must be a table of keys.",
    ]


def test_an_unusable_class_is_the_plugins_fault():
    @frozen
    class Odd:
        value: int | str = 1

    with pytest.raises(PluginError, match=r"'acme'.*Odd.*cannot be read"):
        structure_settings(Odd, {"value": 2}, "acme")
    with pytest.raises(PluginError, match="no attrs class"):
        structure_settings(dict, {}, "acme")


def test_changing_keeps_the_rest():
    before = Settings(owner="", pool=Pool(size=2), mode=Mode.FAST, names=("a",))
    after = changed_settings(before, {"pool.size": 9, "threads": Text("3")}, "acme", {})
    assert after == Settings(owner="", pool=Pool(size=9), mode=Mode.FAST, names=("a",), threads=3)
    assert changed_settings({"a": {"b": 1}}, {"a.c": 2}, "acme", {}) == {"a": {"b": 1, "c": 2}}
    assert changed_settings(None, {"a": 2}, "acme", {}) == {"a": 2}


@pytest.mark.parametrize("changes", [{"a": 1, "a.b": 2}, {"a.b": 2, "a": 1}])
def test_a_key_is_a_value_or_a_table_not_both(changes):
    with pytest.raises(ConfigError, match=r"plugins\.acme\.a = 1 \(me\).*plugins\.acme\.a\.b"):
        changed_settings(None, changes, "acme", {"plugins.acme.a": "me"})


def test_defaults_are_the_plugins_own_business():
    @frozen
    class Free:
        note: str = key("", "none unless given", choices=("a",))
        count: int = key(-1, "unset unless given", low=0)
        folder: Path | None = field(default=None)

    assert structure_settings(Free, {}, "acme") == Free()
    given = {"note": "a", "folder": "/x"}
    assert structure_settings(Free, given, "acme") == Free(note="a", folder=Path("/x"))
    with pytest.raises(ConfigError, match="at least 0"):
        structure_settings(Free, {"count": -1}, "acme")


def test_leaves_have_the_paths_that_set_them():
    leaves = dict(settings_leaves(Settings(owner="me", weights={"w": 1.0}), "acme"))
    assert leaves["plugins.acme.pool.size"] == 1
    assert leaves["plugins.acme.weights.w"] == 1.0
    assert leaves["plugins.acme.threads"] is None
    assert dict(settings_leaves({"a": {"b": 1}}, "acme")) == {"plugins.acme.a.b": 1}
    assert dict(settings_leaves(None, "acme")) == {}


_ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.builds(Text, st.text()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*NAMES, "other"]), _ANY))
@settings(max_examples=150, deadline=None)
def test_any_raw_keys_give_settings_or_a_config_error(raw):
    try:
        structure_settings(Settings, raw, "acme")
    except ConfigError as error:
        problems = error.problems
        assert problems
        assert all(each.key.startswith("plugins.acme") for each in problems)
