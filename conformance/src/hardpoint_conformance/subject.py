"""The plugin under test, and how the kit configures and starts it. Runs in the test's process."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen
from hardpoint.capabilities import SINCE, Capability, Support
from hardpoint.checkpoints import read_description
from hardpoint.config import Config, resolution
from hardpoint.config.loading import load_config
from hardpoint.errors import ConfigError, PluginNotFoundError
from hardpoint.executor import Executor
from hardpoint.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheTensor
from hardpoint.platform import Platform
from hardpoint.registry import Registry
from hardpoint.selection import select_executor, select_platform
from hardpoint.suggestions import did_you_mean

from hardpoint_conformance.kit_model import ModelShape, write_model
from hardpoint_conformance.outcomes import declared
from hardpoint_conformance.probe import Probe, find_probe
from hardpoint_conformance.unchanged import unchanged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hardpoint.checkpoints.description import ModelDescription
    from hardpoint.discovery import Plugin

BLOCKS = 96
"""KV blocks of a group, those that the platform keeps for itself not counted."""
MODEL_LENGTH = 96
"""``max_model_len`` of a group, in tokens; four blocks where these are large."""
MOST_SEQS = 9
"""Requests of a full batch, where the limits allow them: one past a power of two, so that batches
are padded across the edges that buckets usually have.
"""
MOST_TOKENS = 64


@frozen
class Prepared:
    """All that a start needs, decided as an engine would."""

    executor_class: type[Executor]
    config: Config
    registry: Registry
    platform: Platform

    @property
    def description(self) -> ModelDescription:
        """What the model's files say."""
        if self.config.description is None:
            raise ConfigError("no description was read")
        return self.config.description

    def start(self) -> Executor:
        """Start the workers and load the model."""
        return self.executor_class.start(self.config, self.registry, self.platform)


class Subject:
    """One plugin. Nothing is looked for before a test asks, and all that was started is ended by
    :meth:`close`.
    """

    def __init__(
        self,
        name: str,
        *,
        kind: str | None = None,
        executor: str | None = None,
        settings: Mapping[str, object] | None = None,
        probe: Probe | None = None,
    ) -> None:
        self.name = name
        self.wanted_kind = kind
        self.executor = executor
        self.given = dict(settings or {})
        self._probe = probe
        self._plugin: Plugin | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._models: dict[ModelShape, Path] = {}
        self._started: list[Executor] = []
        self.shared: Any = None
        """What the tests of a suite share; dropped after one that failed."""
        self.num_workers: int | None = None
        """With how many workers an executor is tested, once that is known."""
        self.run_by = ""
        """The executor that was chosen last, by name or by default."""
        self.believed: set[str] = set()
        """What could not be compared, in sentences."""
        self.oracle = ""
        """What outputs were compared with, once they were."""

    # Who it is.

    @property
    def kind(self) -> str:
        """``platform`` or ``executor``."""
        return self.plugin.kind

    @property
    def plugin(self) -> Plugin:
        """The plugin as discovery found it and as it is when loaded.

        Raises PluginNotFoundError with close matches, and what loading raised.
        """
        if self._plugin is None:
            registry = Registry.discover()
            kind = self._kind_in(registry)
            if kind is not None:
                self._plugin = registry.load(kind, self.name)
                return self._plugin
            known = [name for kind in self._kinds for name in registry.names(kind)]
            raise PluginNotFoundError(
                f"no {' or '.join(self._kinds)} {self.name!r} is installed. "
                f"{did_you_mean(self.name, known)} Installed: {', '.join(known) or 'none'}"
            )
        return self._plugin

    @cached_property
    def found_kind(self) -> str | None:
        """Its kind, as what is installed says; nothing is loaded. None if there is none such."""
        return self._kind_in(Registry.discover())

    @property
    def probe(self) -> Probe:
        """What looks inside: the one that was given, the installed one, or the default."""
        if self._probe is None:
            self._probe = find_probe(self.name)
        return self._probe

    @property
    def settings(self) -> dict[str, object]:
        """Configuration keys of the probe and of the line that adopted the suite."""
        return {**self.probe.settings, **self.given}

    @property
    def api(self) -> tuple[int, int]:
        """The contract number that the plugin was built for."""
        api: tuple[int, int] = self.plugin.record.api
        return api

    def support(self, capability: Capability) -> Support | None:
        """Return what the platform declares; None for what it should have declared."""
        api = self.api if self.kind == "platform" else SINCE[capability]
        return declared(self.platform(), capability, api)

    # What it is run with.

    def settled(self, **overrides: object) -> Config:
        """Return a configuration that names the plugin and nothing of a model."""
        named: dict[str, object] = {"platform": self.name}
        if self.kind == "executor":
            named = {"platform": "dummy", "executor": self.name}
        return load_config(overrides={**named, **self.settings, **overrides}, environ={})

    def platform(self, **overrides: object) -> Platform:
        """Return a fresh platform, of a registry of its own."""
        config = self.settled(**overrides)
        return Registry.discover(config).platform(str(config.platform))

    def prepare(self, shape: ModelShape | None = None, **overrides: object) -> Prepared:
        """Decide everything for a start, in an engine's order; start nothing.

        Raises ConfigError, PluginError and UnsupportedError as an engine would.
        """
        keys = dict(overrides)
        model = keys.pop("model", None)
        config = self.settled(**{**self._usual(), **keys})
        registry = Registry.discover(config)
        platform = select_platform(registry, config)
        if model is None:
            model = self.model(shape or ModelShape.within(platform.limits(config)))
        config = evolve(
            config,
            model=evolve(config.model, model=str(model)),
            description=read_description(str(model), config.load.load_format),
        )
        with unchanged(config, "hardpoint_configure"):
            configured = resolution.configure(config, registry, platform)
        config = resolution.fill_defaults(configured, platform)
        executor_class = select_executor(registry, config, platform)
        self.run_by = next((each.name for each in registry.used("executor")), "")
        config = resolution.structure_plugins(config, registry)
        with unchanged(config, "Platform.check"):
            resolution.check(config, registry, platform, executor_class)
        return Prepared(executor_class, config, registry, platform)

    def start(self, shape: ModelShape | None = None, **overrides: object) -> Executor:
        """Start workers that have loaded the model; :meth:`close` ends them at the latest."""
        executor = self.prepare(shape, **overrides).start()
        self._started.append(executor)
        return executor

    def ready(self, shape: ModelShape | None = None, **overrides: object) -> Executor:
        """Start workers and give them a KV cache: they can execute."""
        executor = self.start(shape, **overrides)
        executor.initialize_cache(plans(executor))
        return executor

    def model(self, shape: ModelShape) -> Path:
        """Return the folder of the kit's model of that shape, written once."""
        if shape not in self._models:
            folder = self._root() / f"model-{len(self._models)}"
            self._models[shape] = write_model(folder, shape)
        return self._models[shape]

    def scratch(self, name: str) -> Path:
        """Return an empty folder of that name, removed with the models."""
        folder = self._root() / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def prepare_spread(self, **sizes: object) -> Prepared | None:
        """Decide all for several workers; None where no executor for several is installed."""
        try:
            return self.prepare(None, **sizes)
        except PluginNotFoundError:
            return None

    def started(self, prepared: Prepared) -> Executor:
        """Start what was prepared and give it a KV cache."""
        executor = prepared.start()
        self._started.append(executor)
        executor.initialize_cache(plans(executor))
        return executor

    def release(self) -> None:
        """End what the tests of a suite share; the next one that wants it starts it anew."""
        shared, self.shared = self.shared, None
        if shared is not None:
            self.end(shared.executor)

    def end(self, executor: Executor) -> None:
        """Shut one executor down that this subject started."""
        executor.shutdown()
        if executor in self._started:
            self._started.remove(executor)

    def close(self) -> None:
        """End everything that was started. Idempotent."""
        self.shared = None
        while self._started:
            executor = self._started.pop()
            with contextlib.suppress(Exception):
                executor.shutdown()

    def remove(self) -> None:
        """Remove the models, too. Called at the end of the session."""
        self.close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder, self._models = None, {}

    @property
    def _kinds(self) -> tuple[str, ...]:
        return (self.wanted_kind,) if self.wanted_kind else ("platform", "executor")

    def _kind_in(self, registry: Registry) -> str | None:
        return next((kind for kind in self._kinds if registry.has(kind, self.name)), None)

    def _root(self) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="hardpoint-conformance-")
        return Path(self._folder.name)

    def _usual(self) -> dict[str, object]:
        platform = self.platform()
        limits = platform.limits(self.settled())
        sizes = limits.block_sizes or (1,)  # none is an error of its own, told by others
        size = min((n for n in sizes if n >= 4), default=sizes[0])
        tokens = max(MOST_TOKENS, limits.chunk_multiple * 2, 3 * size)
        keys: dict[str, object] = {
            "block_size": size,
            "max_model_len": max(MODEL_LENGTH, 4 * size),
            "max_num_seqs": min(MOST_SEQS, limits.max_num_seqs or MOST_SEQS),
            "max_num_batched_tokens": min(tokens, limits.max_num_batched_tokens or tokens),
            "enable_prefix_caching": False,
            "seed": 7,
        }
        if self.kind == "platform" and self.executor is not None:
            keys["executor"] = self.executor
        return keys


def plans(executor: Executor, num_blocks: int | None = None) -> Sequence[KVCacheConfig]:
    """Return a KV cache of ``num_blocks`` usable blocks for each worker."""
    reserved = executor.platform.limits(executor.config).reserved_blocks
    total = (BLOCKS if num_blocks is None else num_blocks) + reserved
    made = []
    for specs in executor.get_kv_cache_specs():
        tensors = tuple(
            KVCacheTensor(num_bytes=total * spec.page_bytes, layers=(layer,))
            for layer, spec in specs.items()
        )
        group = KVCacheGroup(layers=tuple(specs), spec=next(iter(specs.values())))
        made.append(KVCacheConfig(num_blocks=total, groups=(group,), tensors=tensors))
    return made
