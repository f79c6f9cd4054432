"""What a run would use: the steps of an engine up to where it would start something."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from attrs import evolve, frozen

from hardpoint.errors import ConfigError, HardpointError

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.records import Listener
    from hardpoint.registry import Registry


@frozen(kw_only=True)
class Rehearsal:
    """How far a run would come. ``config`` is as complete as it became; ``error`` is how the run
    would end. ``model`` is None too where none is named and no default is installed. ``listeners``
    are the sockets at which it would listen, None where it does not come so far. ``remarks`` are
    the platform's own on the run.
    """

    config: Config
    platform: str | None = None
    executor: str | None = None
    model: str | None = None
    error: str | None = None
    listeners: Sequence[Listener] | None = None
    remarks: Sequence[str] = ()


class _Step(NamedTuple):
    config: Config
    part: str = ""
    name: Any = ""


def rehearse(config: Config, registry: Registry) -> Rehearsal:
    """Choose and configure as an engine would; start nothing. Called by the doctor."""
    found: dict[str, Any] = {}
    try:
        for step in _steps(config, registry):
            config = step.config
            if step.part:
                found[step.part] = step.name
    except HardpointError as error:
        found["error"] = str(error)
    except Exception as error:  # noqa: BLE001 - a diagnosis ends in words
        found["error"] = f"{type(error).__name__}: {error}"
    return Rehearsal(config=config, **found)


def _steps(config: Config, registry: Registry) -> Iterator[_Step]:
    from hardpoint.checkpoints import read_description
    from hardpoint.config import resolution
    from hardpoint.selection import select_executor, select_platform

    platform = select_platform(registry, config)
    yield _Step(config, "platform", platform.name)
    config = _with_known_model(config)
    described = config.model.model is not None
    if described:
        load_format = config.load.load_format
        description = read_description(str(config.model.model), load_format)
        yield _Step(config, "model", str(description.path))
        config = evolve(config, description=description)
        config = resolution.configure(config, registry, platform)
        yield _Step(config)
    config = resolution.fill_defaults(config, platform)
    yield _Step(config)
    executor = select_executor(registry, config, platform)
    plugin = next((each.name for each in registry.used("executor")), None)
    name = plugin or f"{executor.__module__}:{executor.__qualname__}"
    config = resolution.structure_plugins(config, registry)
    yield _Step(config, "executor", name)
    yield _Step(config, "listeners", tuple(executor.listeners(config, registry, platform)))
    if described:
        resolution.check(config, registry, platform, executor)
        yield _Step(config, "remarks", tuple(platform.remarks(config)))
    resolution.admission_offer(config, registry, platform)


def _with_known_model(config: Config) -> Config:
    """Add the default model where none is named, if it is installed."""
    from hardpoint.default_model import with_model

    try:
        return with_model(config)
    except ConfigError:
        return config
