"""From what was asked for to what will run: plugins' changes, defaults, and who decided what."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve, field, frozen
from hardpoint.capabilities import NOT_YET, YES, Capability
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.config import Config, load_config
from hardpoint.config.keys import get, replace
from hardpoint.config.resolution import (
    check,
    configure,
    effective,
    fill_defaults,
    structure_plugins,
)
from hardpoint.config.schema import key
from hardpoint.errors import ConfigError, PluginConflictError, PluginError
from hardpoint.platform import Platform
from hardpoint.records import Change, Limits, Placement, Problem, Verdict

MODEL = ModelDescription(
    path=Path("model"),
    format="safetensors",
    architecture="LlamaForCausalLM",
    num_layers=4,
    hidden_size=96,
    intermediate_size=64,
    num_heads=9,
    num_kv_heads=3,
    head_size=64,
    vocab_size=256,
    context_length=512,
    stored_dtype="float32",
)


@frozen(kw_only=True)
class Settings:
    threads: int = key(1, "how many", low=1)


class Acme(Platform):
    """A platform that can do what each test wants."""

    name = "acme"
    worker_class = "acme:Worker"
    model_runner_class = "acme:Runner"
    capabilities = dict.fromkeys(Capability, YES)

    def __init__(self, *, limits=None, placement=None, problems=(), lacks=(), settings=None):
        super().__init__(settings)
        self._limits = {"dtypes": ("float32", "bfloat16"), "default_dtype": "float32"}
        self._limits |= limits or {}
        self._placement = placement or {}
        self._problems = problems
        self.capabilities = {**type(self).capabilities, **dict.fromkeys(lacks, NOT_YET)}

    def probe(self):
        return Verdict(available=True, reason="pretended")

    def limits(self, config):
        return Limits(**self._limits)

    def placement(self, config):
        return Placement(**self._placement)

    def check(self, config):
        if isinstance(self._problems, Exception):
            raise self._problems
        return self._problems


@frozen(kw_only=True)
class InUse:
    kind: str
    name: str


@frozen(kw_only=True)
class Plugins:
    """Stands for the registry: what is in use, with which settings, and what it wants changed."""

    changes: tuple = ()
    in_use: dict = field(factory=dict)
    extensions: tuple = ()

    def resolved(self):
        return [InUse(kind=kind, name=name) for kind, name in self.in_use]

    def settings(self, kind, name):
        found = self.in_use[kind, name]
        if isinstance(found, Exception):
            raise found
        return found

    def configure(self, config, platform):
        return self.changes

    def names(self, kind):
        return self.extensions

    def has(self, kind, name):
        return name in self.extensions


def load(**values) -> Config:
    return evolve(load_config(overrides=values, environ={}), description=MODEL)


def wants(key, old, new, plugin="acme", reason="it works so"):
    return (plugin, Change(key=key, old=old, new=new, reason=reason))


# Changes by plugins.


def test_a_change_is_logged_with_its_reason(caplog):
    caplog.set_level("INFO", logger="hardpoint.config")
    configure(load(), Plugins(changes=(wants("block_size", None, 32),)), Acme())
    assert caplog.messages == ["block_size: None -> 32, plugin acme: it works so"]
    caplog.clear()
    configure(load(block_size=32), Plugins(changes=(wants("block_size", 32, 32),)), Acme())
    assert caplog.messages == []


def test_a_plugin_sets_what_nobody_set_and_the_origin_names_it():
    plugins = Plugins(
        changes=(
            wants("block_size", None, 32),
            wants("enable_prefix_caching", True, False, plugin="tracer"),
            wants("plugins.tracer.level", None, "high", plugin="tracer"),
        )
    )
    before = load(nnodes=1)
    config = configure(before, plugins, Acme())
    assert config.cache.block_size == 32
    assert config.cache.enable_prefix_caching is False
    assert config.plugins.settings == {"tracer": {"level": "high"}}
    assert config.origins["block_size"] == "plugin acme: it works so"
    assert not config.is_explicit("block_size")
    assert before.cache.block_size is None
    assert before.origins == {"nnodes": "Python"}


@pytest.mark.parametrize("path", ["dtype", "block_size", "max_num_seqs", "max_model_len", "seed"])
def test_any_unset_key_can_be_changed_before_it_is_consumed(path):
    new = {"dtype": "bfloat16"}.get(path, 16)
    plugins = Plugins(changes=(wants(path, get(load(), path), new),))
    assert get(configure(load(), plugins, Acme()), path) == new


@pytest.mark.parametrize(
    ("sources", "origin"),
    [
        ({"overrides": {"block_size": 16}}, "Python"),
        ({"flags": {"block_size": "16"}}, "flag --block-size"),
        ({"sets": ["block_size=16"]}, "flag --set block_size"),
        ({"environ": {"HARDPOINT_BLOCK_SIZE": "16"}}, "HARDPOINT_BLOCK_SIZE"),
    ],
)
def test_a_change_of_what_the_user_set_is_the_plugins_error(sources, origin):
    config = load_config(**{"environ": {}, **sources})
    plugins = Plugins(changes=(wants("block_size", 16, 32, plugin="tracer"),))
    with pytest.raises(PluginError) as caught:
        configure(config, plugins, Acme())
    text = str(caught.value)
    assert "plugin 'tracer' wants block_size = 32 (it works so)" in text
    assert f"{origin} set it to 16" in text
    assert "plugins.disable" in text


def test_a_default_that_the_user_typed_is_protected_too():
    plugins = Plugins(changes=(wants("enable_prefix_caching", True, False),))
    with pytest.raises(PluginError, match="never changed"):
        configure(load(enable_prefix_caching=True), plugins, Acme())
    assert configure(load(), plugins, Acme()).cache.enable_prefix_caching is False


def test_wanting_what_the_user_set_anyway_changes_nothing():
    plugins = Plugins(changes=(wants("block_size", 16, 16),))
    config = configure(load(block_size=16), plugins, Acme())
    assert config.origins["block_size"] == "Python"


def test_a_typed_auto_leaves_the_plugin_free():
    plugins = Plugins(changes=(wants("dtype", "auto", "bfloat16"),))
    assert configure(load(dtype="auto"), plugins, Acme()).model.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (wants("blok_size", None, 1), "'acme'.*blok_size.*Did you mean block_size"),
        (wants("block_size", 8, 1), "'acme'.*instead of 8, but its value is None"),
        (wants("block_size", None, 0), "'acme'.*block_size = 0.*at least 1"),
        (wants("block_size", None, "4"), "'acme'.*whole number"),
        (wants("dtype", "auto", "float8"), "'acme'.*one of"),
        (wants("platform", None, "other"), "'acme'.*has had its effect"),
        (wants("plugins.provider.x", None, "y"), "'acme'.*has had its effect"),
        (wants("plugins.acme.threads", None, 3), "'acme'.*has had its effect"),
        (wants("description", None, 3), "not a configuration key"),
    ],
)
def test_a_change_that_cannot_be_made_is_the_plugins_error(change, words):
    with pytest.raises(PluginError, match=words):
        configure(load(), Plugins(changes=(change,)), Acme())


def test_two_plugins_that_want_one_key_otherwise_are_both_named():
    plugins = Plugins(
        changes=(wants("block_size", None, 8), wants("block_size", None, 16, plugin="tracer"))
    )
    with pytest.raises(PluginConflictError, match=r"'acme'.*= 8.*'tracer'.*to 16.*block_size"):
        configure(load(), plugins, Acme())
    agreed = Plugins(
        changes=(wants("block_size", None, 8), wants("block_size", None, 8, plugin="tracer"))
    )
    assert configure(load(), agreed, Acme()).cache.block_size == 8


# Settings of plugins in use.


def test_settings_of_plugins_in_use_replace_their_raw_keys():
    config = load(plugins={"acme": {"threads": 2}, "other": {"x": 1}})
    plugins = Plugins(in_use={("platform", "acme"): Settings(threads=2), ("executor", "uni"): None})
    structured = configure(config, plugins, Acme())
    assert structured.plugins.settings == {"acme": Settings(threads=2), "other": {"x": 1}}
    assert ("plugins.acme.threads", 2, "Python") in effective(structured)


def test_a_plugins_change_of_another_ones_settings_survives_later_structuring():
    plugins = Plugins(
        in_use={("extension", "tracer"): Settings()},
        changes=(wants("plugins.tracer.threads", 1, 7),),
    )
    config = configure(load(), plugins, Acme())
    assert config.settings_of("tracer") == Settings(threads=7)
    assert structure_plugins(config, plugins).settings_of("tracer") == Settings(threads=7)


def test_wrong_settings_of_several_plugins_are_told_together_with_origins():
    config = load(plugins={"a": {"threads": 0}, "b": {"threads": "x"}})
    problems = [
        Problem(key=f"plugins.{name}.threads", value=value, message="is wrong.")
        for name, value in (("a", 0), ("b", "x"))
    ]
    errors = [ConfigError("wrong", problems=[problem]) for problem in problems]
    in_use = {("platform", "a"): errors[0], ("extension", "b"): errors[1]}
    in_use["extension", "c"] = ConfigError("takes no keys")
    with pytest.raises(ConfigError) as caught:
        configure(config, Plugins(in_use=in_use), Acme())
    assert [(each.key, each.origin) for each in caught.value.problems] == [
        ("plugins.a.threads", "Python"),
        ("plugins.b.threads", "Python"),
        ("plugins.c", ""),
    ]


def test_one_name_cannot_have_two_kinds_of_settings():
    @frozen
    class Other:
        """Another class."""

    in_use = {("platform", "acme"): Settings(), ("executor", "acme"): Other()}
    with pytest.raises(PluginConflictError, match=r"'acme'.*Settings.*Other"):
        structure_plugins(load(), Plugins(in_use=in_use))


# Defaults.


def test_defaults_come_from_the_platform_and_say_so():
    limits = {"default_dtype": "bfloat16", "block_sizes": (32, 16), "default_max_num_seqs": 7}
    config = fill_defaults(load(), Acme(limits=limits))
    assert config.model.dtype == config.cache.kv_cache_dtype == "bfloat16"
    assert config.cache.block_size == 32
    assert config.scheduler.max_num_seqs == 7
    assert config.scheduler.max_num_batched_tokens == 2048
    assert config.scheduler.prefill_chunk_size == 2048
    assert config.cache.enable_prefix_caching is True
    assert config.model.max_model_len is None
    for path in ("dtype", "kv_cache_dtype", "block_size", "max_num_seqs", "prefill_chunk_size"):
        assert config.origins[path] == "default of platform acme"
        assert not config.is_explicit(path)


def test_defaults_never_touch_what_somebody_set_possible_or_not():
    explicit = {
        "dtype": "bfloat16",
        "kv_cache_dtype": "float32",
        "block_size": 3,
        "max_num_seqs": 1000,
        "max_num_batched_tokens": 1,
        "prefill_chunk_size": 5,
        "enable_prefix_caching": True,
    }
    platform = Acme(limits={"max_num_seqs": 1}, lacks=[Capability.PREFIX_CACHING])
    config = fill_defaults(load(**explicit), platform)
    assert {path: get(config, path) for path in explicit} == explicit
    assert set(config.origins.values()) == {"Python"}
    by_plugin = replace(load(), {"block_size": 8}, "plugin tracer: why")
    assert fill_defaults(by_plugin, platform).cache.block_size == 8


@pytest.mark.parametrize(
    ("limits", "given", "seqs", "tokens", "chunk"),
    [
        ({"max_num_seqs": 4}, {}, 4, 2048, 2048),
        ({"max_num_batched_tokens": 100, "chunk_multiple": 32}, {}, 64, 100, 96),
        ({"default_max_num_batched_tokens": 8}, {}, 64, 64, 64),
        ({"default_max_num_batched_tokens": 8}, {"max_num_seqs": 9}, 9, 9, 9),
        ({"default_max_num_batched_tokens": 8, "chunk_multiple": 128}, {}, 64, 128, 128),
        ({}, {"max_num_batched_tokens": 50}, 64, 50, 50),
    ],
)
def test_batch_sizes_fit_the_limits_and_each_other(limits, given, seqs, tokens, chunk):
    config = fill_defaults(load(**given), Acme(limits=limits))
    scheduler = config.scheduler
    found = (
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        scheduler.prefill_chunk_size,
    )
    assert found == (seqs, tokens, chunk)


def test_without_chunked_prefill_a_step_holds_the_longest_prompt():
    platform = Acme(
        limits={"default_max_num_batched_tokens": 8}, lacks=[Capability.CHUNKED_PREFILL]
    )
    config = fill_defaults(load(), platform)
    assert config.scheduler.max_num_batched_tokens == MODEL.context_length
    assert config.scheduler.prefill_chunk_size is None
    check(config, Plugins(), platform)
    short = fill_defaults(load(max_model_len=100), platform)
    assert short.scheduler.max_num_batched_tokens == 100


def test_a_platform_without_prefix_caching_turns_the_default_off():
    config = fill_defaults(load(), Acme(lacks=[Capability.PREFIX_CACHING]))
    assert config.cache.enable_prefix_caching is False


def test_filled_defaults_pass_the_check():
    for lacks in ([], [Capability.PREFIX_CACHING], [Capability.CHUNKED_PREFILL]):
        platform = Acme(lacks=lacks, limits={"chunk_multiple": 3000, "max_num_seqs": 2})
        check(fill_defaults(load(), platform), Plugins(), platform)


# What the doctor shows.


def test_effective_lists_every_key_with_its_origin():
    config = load(seed=3, plugins={"acme": {"threads": 2}, "provider": {"x": "y"}})
    rows = {path: (value, origin) for path, value, origin in effective(config)}
    assert rows["seed"] == (3, "Python")
    assert rows["nnodes"] == (1, "default")
    assert rows["plugins.acme.threads"] == (2, "Python")
    assert rows["plugins.provider"] == ({"x": "y"}, "Python")


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"block_sizes": ()}, "block_sizes is empty"),
        ({"block_sizes": (16, 0)}, "block_sizes has 0"),
        ({"dtypes": ()}, "dtypes is empty"),
        ({"default_dtype": "float64"}, "default_dtype 'float64' is not one of"),
        ({"chunk_multiple": 0}, "chunk_multiple has 0"),
        ({"max_num_seqs": 0}, "max_num_seqs has 0"),
        ({"max_num_batched_tokens": 8, "chunk_multiple": 16}, "chunk_multiple 16 is over 8"),
    ],
)
def test_limits_that_cannot_be_met_are_the_platforms_error(limits, words):
    with pytest.raises(PluginError, match=f"platform 'acme'.*{words}"):
        fill_defaults(Config(), Acme(limits=limits))
