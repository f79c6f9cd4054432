"""Sources of the configuration: precedence, exact paths, close matches, origins, hostile files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hardpoint.config import Config, load_config
from hardpoint.config.keys import KEYS, get
from hardpoint.config.loading import MAX_FILE_BYTES
from hardpoint.errors import ConfigError
from hardpoint.executor import Executor
from hypothesis import given, settings
from hypothesis import strategies as st


def load(**sources) -> Config:
    return load_config(**{"environ": {}, **sources})


def refused(**sources) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(**sources)
    assert caught.value.exit_code == 2
    return caught.value


def toml(tmp_path, text: str) -> Path:
    file = tmp_path / "house.toml"
    file.write_text(text)
    return file


def test_nothing_given_is_the_schema_and_has_no_origins():
    assert load() == Config()
    assert load().origins == {}


def test_stronger_sources_win_and_each_key_knows_its_origin(tmp_path):
    file = toml(tmp_path, 'dtype = "float32"\nmax_num_seqs = 1\nblock_size = 8\nnnodes = 2\n')
    environ = {"HARDPOINT_MAX_NUM_SEQS": "2", "HARDPOINT_BLOCK_SIZE": "16"}
    config = load(
        file=file,
        environ=environ,
        flags={"block_size": 32, "seed": None},
        sets=["max_loras=3"],
        overrides={"max_model_len": 64, "tokenizer": None},
    )
    assert config.model.dtype == "float32"
    assert config.scheduler.max_num_seqs == 2
    assert config.cache.block_size == 32
    assert dict(config.origins) == {
        "dtype": f"file {file}",
        "nnodes": f"file {file}",
        "max_num_seqs": "HARDPOINT_MAX_NUM_SEQS",
        "block_size": "flag --block-size",
        "max_loras": "flag --set max_loras",
        "max_model_len": "Python",
    }
    assert all(config.is_explicit(path) for path in config.origins)
    assert not config.is_explicit("seed")


@pytest.mark.parametrize(
    "sources",
    [
        {"overrides": {"nnodes": 3}},
        {"flags": {"nnodes": "3"}},
        {"sets": ["nnodes=3"]},
        {"environ": {"HARDPOINT_NNODES": "3"}},
    ],
)
def test_each_source_beats_the_file(tmp_path, sources):
    assert load(file=toml(tmp_path, "nnodes = 2"), **sources).parallel.nnodes == 3


def test_the_variable_names_the_file_and_the_flag_beats_it(tmp_path):
    named = toml(tmp_path, "nnodes = 2")
    flagged = tmp_path / "other.toml"
    flagged.write_text("seed = 5")
    environ = {"HARDPOINT_CONFIG": str(named)}
    assert load(environ=environ).parallel.nnodes == 2
    config = load(environ=environ, file=flagged)
    assert (config.parallel.nnodes, config.model.seed) == (1, 5)


def test_the_process_environment_is_read_when_none_is_given(monkeypatch):
    monkeypatch.setenv("HARDPOINT_SEED", "9")
    assert load_config().model.seed == 9


def test_an_empty_variable_counts_as_unset():
    environ = {"HARDPOINT_SEED": "", "HARDPOINT_CONFIG": "", "HARDPOINT_DISABLE": ""}
    assert load(environ=environ) == Config()


@pytest.mark.parametrize("name", ["HARDPOINT_Seed", "HARDPOINT_", "HARDPOINT_PLUGINS__DISABLE__X"])
def test_a_variable_must_be_spelt_exactly(name):
    (problem,) = refused(environ={name: "1"}).problems
    assert problem.key == name


def test_plugin_keys_merge_leaf_by_leaf(tmp_path):
    file = toml(tmp_path, "[plugins.cpu]\nthreads = 2\npin = true\n[plugins.cpu.pool]\nsize = 1\n")
    config = load(
        file=file,
        environ={"HARDPOINT_PLUGINS__CPU__THREADS": "4"},
        overrides={"plugins": {"cpu": {"pool": {"kind": "slab"}}}},
    )
    assert config.plugins.settings == {
        "cpu": {"threads": "4", "pin": True, "pool": {"size": 1, "kind": "slab"}}
    }
    assert config.origins["plugins.cpu.threads"] == "HARDPOINT_PLUGINS__CPU__THREADS"
    assert config.origins["plugins.cpu.pool.size"] == f"file {file}"
    assert config.origins["plugins.cpu.pool.kind"] == "Python"


def test_disabling_and_providers():
    config = load(environ={"HARDPOINT_DISABLE": "a, b"}, sets=["plugins.provider.acme=acme-dist"])
    assert config.plugins.disable == ("a", "b")
    assert config.origins["plugins.disable"] == "HARDPOINT_DISABLE"
    assert config.plugins.provider == {"acme": "acme-dist"}
    whole = load(environ={"HARDPOINT_PLUGINS__PROVIDER": "acme=one,other=two"})
    assert whole.plugins.provider == {"acme": "one", "other": "two"}


def test_an_executor_may_be_a_class_only_in_python():
    assert load(overrides={"executor": Executor}).executor is Executor
    assert "reference" in str(refused(overrides={"executor": 3}))


def test_paths_and_sets_become_plain_values(tmp_path):
    config = load(overrides={"model": tmp_path, "devices": ["1", "0"]})
    assert config.model.model == str(tmp_path)
    assert config.device.devices == ("1", "0")
    assert load(sets=["devices=1,0"]).device.devices == ("1", "0")
    assert type(load(sets=["model=x"]).model.model) is str


def test_auto_is_a_choice_left_open_even_when_it_was_typed(tmp_path):
    config = load(flags={"dtype": "auto"}, file=toml(tmp_path, 'dtype = "float32"'))
    assert config.model.dtype == "auto"
    assert not config.is_explicit("dtype")
    assert "flag --dtype" in config.origins["dtype"]


def test_everything_wrong_is_told_at_once_with_key_value_origin_and_way_out(tmp_path):
    file = toml(tmp_path, "max_num_seq = 1\ndtype = 3\n[cache]\nblock_size = 8\n")
    error = refused(
        file=file,
        environ={"HARDPOINT_BLOK_SIZE": "8", "HARDPOINT_NNODES": "two"},
        flags={"load_format": "safetensor"},
        sets=["seed", "memory_utilization=1.5"],
        overrides={"temperature": 0, "tensor_parallel_size": True, "plugins": {"cpu": 1}},
    )
    shown = {problem.key: str(problem) for problem in error.problems}
    origin = f"file {file}"
    assert shown == {
        "HARDPOINT_BLOK_SIZE": "HARDPOINT_BLOK_SIZE = '8': is not a variable of Hardpoint. "
        "Did you mean HARDPOINT_BLOCK_SIZE?",
        "max_num_seq": f"max_num_seq = 1 ({origin}): is not a configuration key. "
        "Did you mean max_num_seqs?",
        "dtype": f"dtype = 3 ({origin}): must be text.",
        "cache.block_size": f"cache.block_size = 8 ({origin}): is not a configuration key. "
        "Did you mean block_size?",
        "nnodes": "nnodes = 'two' (HARDPOINT_NNODES): must be a whole number.",
        "load_format": "load_format = 'safetensor' (flag --load-format): must be one of auto, "
        "safetensors, gguf, sharded_state, dummy. Did you mean safetensors?",
        "--set": "--set = 'seed': is not of the form KEY=VALUE. "
        "Write for example --set max_num_seqs=8.",
        "memory_utilization": "memory_utilization = '1.5' (flag --set memory_utilization): must be "
        "more than 0 and at most 1.",
        "temperature": "temperature = 0 (Python): is not a configuration key. temperature is a "
        "sampling parameter, not a configuration key.",
        "tensor_parallel_size": "tensor_parallel_size = True (Python): must be a whole number.",
        "plugins.cpu": "plugins.cpu = 1 (Python): is not a configuration key. A plugin's own keys "
        "are plugins.cpu.KEY.",
    }
    assert all(line in str(error) for line in shown.values())


def test_a_weak_source_is_checked_though_a_strong_one_overrides_it(tmp_path):
    error = refused(file=toml(tmp_path, "nnodes = -1"), overrides={"nnodes": 2})
    assert error.problems[0].origin.startswith("file ")


@pytest.mark.parametrize(
    "key",
    ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes"],
)
@pytest.mark.parametrize("value", [0, -1])
def test_a_world_of_no_workers_is_refused(key, value):
    (problem,) = refused(overrides={key: value}).problems
    assert (problem.key, problem.value, problem.message) == (key, value, "must be at least 1.")


def test_two_equal_sources_that_contradict_each_other_are_an_error():
    error = refused(flags={"dtype": "float32"}, sets=["dtype=bfloat16"])
    assert "'float32' (flag --dtype)" in str(error)
    same = load(flags={"dtype": "float32"}, sets=["dtype=float32"])
    assert same.model.dtype == "float32"


def test_a_value_and_a_table_of_one_name_are_an_error(tmp_path):
    file = toml(tmp_path, "[plugins.cpu]\npool = 3")
    error = refused(file=file, sets=["plugins.cpu.pool.size=1"])
    assert error.problems[0].key == "plugins.cpu.pool"
    assert error.problems[0].origin == f"file {file}"


@pytest.mark.parametrize(
    "name",
    ["plugins.settings.cpu", "plugins.disable.x", "plugins.cpu.", "plugins..x", "plugins", ""],
)
def test_a_malformed_path_is_no_key(name):
    refused(overrides={name: 1})


def test_an_enormous_value_is_not_repeated_whole():
    assert len(str(refused(overrides={"nnodes": ["9" * 100_000] * 100}))) < 1500


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"dtype = ", "is not valid TOML"),
        (b"dtype = 'float32'\nx ? 3", "line 2"),
        (b"\xff\xfe", "is not UTF-8 at byte 0"),
        (b"x = " + b"[" * 50_000, "is nested too deep"),
        (b"x = 1" + b"0" * 5_000, "is not valid TOML"),
        (b"#" * (MAX_FILE_BYTES + 1), "is larger than"),
        (b"a." * 5_000 + b"b = 1", "is not a configuration key"),
        (b"plugins.cpu." + b"a." * 500 + b"b = 1", "deep"),
    ],
)
def test_a_hostile_file_is_a_short_error_with_its_name(tmp_path, content, words):
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    text = str(refused(file=file))
    assert words in text
    assert str(file) in text
    assert len(text) < 100_000


def test_only_a_regular_file_is_read(tmp_path):
    missing = refused(environ={"HARDPOINT_CONFIG": str(tmp_path / "none.toml")})
    assert "there is no such file" in str(missing)
    assert "HARDPOINT_CONFIG" in str(missing)
    assert "is no regular file" in str(refused(file=tmp_path))
    os.mkfifo(tmp_path / "pipe")
    assert "is no regular file" in str(refused(file=tmp_path / "pipe"))


PLAIN = [key for key in KEYS if key.type in (int, float, bool, str) and not key.choices]
_VALUES = {
    int: st.integers(2, 10**9),
    float: st.floats(0.01, 1),
    bool: st.booleans(),
    str: st.from_regex(r"[a-z][a-z0-9/._-]{0,12}", fullmatch=True).filter(lambda v: v != "auto"),
}


@st.composite
def assignments(draw):
    keys = draw(st.lists(st.sampled_from(PLAIN), unique_by=lambda key: key.path))
    return {key.path: draw(_VALUES[key.type]) for key in keys}


@given(assignments())
@settings(max_examples=60, deadline=None)
def test_python_flags_sets_environment_and_file_agree(values):
    texts = {path: str(value) for path, value in values.items()}
    variable = {key.path: key.variable for key in KEYS}
    python = load(overrides=values)
    from_others = [
        load(flags=texts),
        load(sets=[f"{path}={text}" for path, text in texts.items()]),
        load(environ={variable[path]: text for path, text in texts.items()}),
    ]
    for config in from_others:
        assert all(get(config, path) == get(python, path) == values[path] for path in values)
        assert config.origins.keys() == python.origins.keys() == values.keys()


_TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([key.path for key in KEYS] + ["plugins", "cpu", "é", ""]), inner
        )
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([key.path for key in KEYS] + ["plugins", "x"]), _TREES))
@settings(max_examples=100, deadline=None)
def test_any_tree_of_values_gives_a_config_or_a_config_error(tree):
    try:
        assert isinstance(load(overrides=tree), Config)
    except ConfigError as error:
        assert error.problems  # noqa: PT017 - either outcome is good


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_any_bytes_as_a_file_give_a_config_or_a_config_error(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "fuzz.toml"
    file.write_bytes(content)
    try:
        assert isinstance(load(file=file), Config)
    except ConfigError as error:
        assert error.problems  # noqa: PT017 - either outcome is good


def test_loading_imports_nothing_heavy_and_reads_toml_only_for_a_file():
    code = (
        "import sys, hardpoint.config as c; c.load_config(environ={}, sets=['nnodes=2']);"
        "print([m for m in ('cattrs', 'tomllib', 'rich', 'click', 'pluggy', 'torch') "
        "if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.strip() == "[]"
