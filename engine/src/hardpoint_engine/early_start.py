"""What an executor may begin while the driver still reads the model's description."""

from __future__ import annotations

import logging
from typing import Self

from hardpoint.config import Config
from hardpoint.executor import Executor, Prepared
from hardpoint.platform import Platform
from hardpoint.references import is_reference, resolve_class
from hardpoint.registry import Registry
from hardpoint.selection import default_executor

_logger = logging.getLogger("hardpoint.engine")


class EarlyStart:
    """Has the executor that will most likely be chosen begin early; whatever is begun is used by
    :meth:`start` or given back at the end of the ``with`` block.
    """

    def __init__(self, config: Config, registry: Registry, platform: Platform) -> None:
        self._registry = registry
        self._platform = platform
        self._class: type[Executor] | None = None
        self._prepared: Prepared | None = None
        try:
            self._class = likely_executor(config, registry, platform)
            if self._class is not None:
                self._prepared = self._class.prepare(config, registry, platform)
        except Exception as error:  # noqa: BLE001 - the start proper meets it again, and raises it
            _logger.debug("nothing was begun early: %s", error)

    def start(self, chosen: type[Executor], config: Config) -> Executor:
        """Start the executor ``chosen`` in the end, with what was begun if it was for that one."""
        if self._prepared is None or chosen is not self._class:
            return chosen.start(config, self._registry, self._platform)
        prepared, self._prepared = self._prepared, None
        return chosen.start(config, self._registry, self._platform, prepared)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.close()


def likely_executor(
    config: Config, registry: Registry, platform: Platform
) -> type[Executor] | None:
    """Return the executor class that the configuration leads to, by all that is known before the
    model's description is read; None if that is not to be told. Puts no plugin in use.
    """
    wanted = config.executor
    if wanted is None:
        wanted = default_executor(platform.placement(config))
    if not isinstance(wanted, str):
        return wanted if issubclass(wanted, Executor) else None
    if registry.has("executor", wanted):
        return registry.executor(wanted)
    return resolve_class(wanted, Executor) if is_reference(wanted) else None
