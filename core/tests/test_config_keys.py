"""Keys: every field of the schema has one, typed and documented; get, replace, and their errors."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import pytest
from attrs import evolve, field, fields, frozen, has
from hardpoint.config.keys import BY_PATH, KEYS, get, replace
from hardpoint.config.schema import Config, key
from hardpoint.config.values import Text
from hardpoint.errors import ConfigError
from hardpoint.executor import Executor

BARE = {"description", "origins"}


def test_every_field_of_the_schema_is_a_key_with_help():
    expected = set()
    for attribute in fields(Config):
        value = getattr(Config(), attribute.name)
        if has(type(value)):
            expected |= {(attribute.name, inner.name) for inner in fields(type(value))}
        elif attribute.name not in BARE:
            expected.add(("", attribute.name))
    expected.remove(("plugins", "settings"))
    assert {(each.section, each.name) for each in KEYS} == expected
    assert all(each.help for each in KEYS)


def test_paths_are_unique_bare_names_except_the_plugins_own():
    assert len(BY_PATH) == len(KEYS)
    dotted = {each.path for each in KEYS if "." in each.path}
    assert {path for path in dotted if path.startswith("plugins.")} == {
        "plugins.disable", "plugins.strict", "plugins.provider",
    }  # fmt: skip
    assert {path.partition(".")[0] for path in dotted} == {"plugins", "rpc"}
    assert {each.path for each in KEYS if each.flag is None} == {"plugins.provider"}
    assert BY_PATH["max_num_seqs"].flag == "--max-num-seqs"
    assert BY_PATH["plugins.disable"].variable == "HARDPOINT_PLUGINS__DISABLE"


@pytest.mark.parametrize(
    ("path", "kind", "optional", "default"),
    [
        ("platform", str, True, None),
        ("executor", str, True, None),
        ("dtype", str, False, "auto"),
        ("seed", int, True, None),
        ("memory_utilization", float, False, 0.9),
        ("enable_prefix_caching", bool, False, True),
        ("devices", tuple, True, None),
        ("graph_sizes", tuple, True, None),
        ("plugins.disable", tuple, False, ()),
        ("plugins.provider", dict, False, {}),
    ],
)
def test_the_type_and_default_of_a_key(path, kind, optional, default):
    found = BY_PATH[path]
    assert (found.type, found.optional, found.default) == (kind, optional, default)


def test_defaults_satisfy_their_own_bounds():
    for each in KEYS:
        if each.default not in (None, {}):
            assert each.read(each.default) == each.default


@pytest.mark.parametrize(
    ("path", "value", "must"),
    [
        ("seed", 1.0, "whole number"),
        ("seed", True, "whole number"),
        ("seed", "1", "whole number"),
        ("seed", Text("1.5"), "whole number"),
        ("seed", 2**63, "at most 9223372036854775807"),
        ("seed", -1, "at least 0"),
        ("num_kv_blocks", 1, "at least 2"),
        ("memory_utilization", 0, "more than 0 and at most 1"),
        ("memory_utilization", 1.01, "more than 0 and at most 1"),
        ("memory_utilization", float("nan"), "finite"),
        ("rpc.spin_us", float("nan"), "finite"),
        ("rpc.spin_us", -1.0, "at least 0"),
        ("tensor_parallel_size", 0, "at least 1"),
        ("pipeline_parallel_size", 0, "at least 1"),
        ("memory_utilization", Text("inf"), "finite"),
        ("memory_utilization", 10**400, "number"),
        ("memory_utilization", "0.5", "number"),
        ("enable_prefix_caching", 1, "true or false"),
        ("enable_prefix_caching", "true", "true or false"),
        ("enable_prefix_caching", Text("maybe"), "true or false"),
        ("dtype", "float64", "one of auto, float32, bfloat16, float16"),
        ("dtype", None, "text"),
        ("model", "", "not be empty"),
        ("model", b"x", "text"),
        ("devices", "0", "a list"),
        ("devices", [0], "a list of texts"),
        ("graph_sizes", ["1"], "a list of whole numbers"),
        ("graph_sizes", Text("1,x"), "a list of whole numbers"),
        ("graph_sizes", [4, 0], "at least 1"),
        ("graph_sizes", 4, "a list"),
        ("batch_timing_interval", 0, "more than 0"),
        ("plugins.disable", [""], "a list of texts"),
        ("plugins.provider", {"a": 1}, "text"),
        ("plugins.provider", {1: "a"}, "table"),
        ("plugins.provider", Text("a"), "table"),
        ("executor", 3, "a class"),
        ("executor", "", "a class"),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused(path, value, must):
    with pytest.raises(ConfigError, match=must) as caught:
        replace(Config(), {path: value}, "test")
    (problem,) = caught.value.problems
    assert (problem.key, problem.value, problem.origin) == (path, value, "test")


@pytest.mark.parametrize(
    ("path", "value", "read"),
    [
        ("seed", Text("1_000"), 1000),
        ("memory_utilization", 1, 1.0),
        ("memory_utilization", Text("0.5"), 0.5),
        ("enable_prefix_caching", Text("OFF"), False),
        ("enable_prefix_caching", Text("1"), True),
        ("devices", ["b", "a"], ("b", "a")),
        ("devices", {"b", "a"}, ("a", "b")),
        ("devices", Text("b, a,"), ("b", "a")),
        ("graph_sizes", [8, 2], (8, 2)),
        ("graph_sizes", Text("1, 2,"), (1, 2)),
        ("plugins.provider", {"a": "b"}, {"a": "b"}),
        ("executor", Executor, Executor),
        ("executor", "acme.thing:Executor", "acme.thing:Executor"),
        ("seed", None, None),
    ],
)
def test_a_good_value_is_read_and_kept_with_its_origin(path, value, read):
    config = replace(Config(), {path: value}, "test")
    assert get(config, path) == read
    assert type(get(config, path)) is type(read)
    assert config.origins == {path: "test"}


def test_replace_reports_every_problem_and_changes_nothing():
    config = Config()
    with pytest.raises(ConfigError) as caught:
        replace(config, {"nnodes": 0, "block_sise": 1, "seed": 3}, "test")
    assert [problem.key for problem in caught.value.problems] == ["nnodes", "block_sise"]
    assert "Did you mean block_size?" in str(caught.value)
    assert config == Config()


def test_an_unknown_path_cannot_be_read():
    with pytest.raises(ConfigError, match="Did you mean dtype"):
        get(Config(), "dtyp")
    with pytest.raises(ConfigError, match=r"plugins\.acme\.KEY"):
        get(Config(), "plugins.acme")


def test_one_entry_of_a_table_has_a_path():
    config = replace(Config(), {"plugins.provider.a": "x"}, "one")
    config = replace(config, {"plugins.provider.b": "y"}, "two")
    assert config.plugins.provider == {"a": "x", "b": "y"}
    assert get(config, "plugins.provider.b") == "y"
    assert get(config, "plugins.provider.c") is None
    assert config.origins == {"plugins.provider.a": "one", "plugins.provider.b": "two"}


@frozen(kw_only=True)
class Pool:
    size: int = key(1, "how large", low=1)


@frozen(kw_only=True)
class Settings:
    threads: int | None = key(None, "how many", low=1)
    pool: Pool = field(factory=Pool)


def test_plugin_keys_are_replaced_raw_and_structured():
    raw = replace(Config(), {"plugins.acme.threads": 2, "plugins.acme.pool.size": 3}, "test")
    assert raw.settings_of("acme") == {"threads": 2, "pool": {"size": 3}}
    assert get(raw, "plugins.acme.pool.size") == 3
    assert get(raw, "plugins.acme.other") is get(raw, "plugins.none.at.all") is None
    structured = replace(Config(), {"seed": 1}, "test")
    structured = replace_settings(structured, Settings(threads=1))
    changed = replace(structured, {"plugins.acme.pool.size": 5}, "later")
    assert changed.settings_of("acme") == Settings(threads=1, pool=Pool(size=5))
    assert get(changed, "plugins.acme.pool.size") == 5
    with pytest.raises(ConfigError, match=r"plugins\.acme\.pool\.size = 0 \(later\)"):
        replace(structured, {"plugins.acme.pool.size": 0}, "later")
    with pytest.raises(ConfigError, match=r"Did you mean threads\?"):
        replace(structured, {"plugins.acme.thread": 1}, "later")


def replace_settings(config: Config, settings: object) -> Config:
    return evolve(config, plugins=evolve(config.plugins, settings={"acme": settings}))


def test_a_configuration_travels_to_workers_as_it_is():
    config = replace(Config(), {"executor": Executor, "seed": 3, "plugins.a.b": Text("4")}, "test")
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert isinstance(copy.plugins.settings, Mapping)
    with pytest.raises(AttributeError):
        copy.seed = 4


def test_sub_configurations_are_the_ten_of_the_executors_api_and_three_of_ours():
    sections = {each.section for each in KEYS} - {"", "plugins"}
    assert sections - {"graph", "rpc", "sampling"} == {
        "model", "cache", "parallel", "scheduler", "load", "device", "lora", "speculative",
        "prompt_adapter", "observability",
    }  # fmt: skip
