"""Engines that pause: scheduling sleeps as memory does, under a tag of its own. Driver side.

Level 0 pauses only; levels 1 and 2 pause, and give memory back. While scheduling sleeps, requests
are taken in and wait; a step that the workers have comes to its end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hardpoint.errors import InvalidRequestError, UnsupportedError
from hardpoint.sleep import TAGS

if TYPE_CHECKING:
    from hardpoint_engine.core import EngineCore

SCHEDULING = "scheduling"
ALL_TAGS = (*TAGS, SCHEDULING)
LEVELS = (0, 1, 2)

_logger = logging.getLogger("hardpoint.engine")


def sleep(core: EngineCore, level: int) -> None:
    """Pause ``core``, and at level 1 or 2 have its workers give memory back.

    Raises InvalidRequestError for another level, SleepStateError as the executor does, and
    UnsupportedError where nothing can sleep: then the engine goes on as it was.
    """
    if level not in LEVELS or isinstance(level, bool):
        raise InvalidRequestError(
            f"level must be one of {', '.join(map(str, LEVELS))}, not {level!r}",
            field="level",
            value=level,
        )
    paused = core.paused
    core.pause()
    try:
        if level:
            core.executor.sleep(level)
    except UnsupportedError:
        if not paused:
            core.resume()
        raise


def wake_up(core: EngineCore, tags: Iterable[str] | None) -> None:
    """Bring memory back, then resume if ``scheduling`` is among ``tags`` (None: all of them).

    Scheduling resumes only when all memory is there and defined. If it is not, and scheduling was
    named, raises SleepStateError; else a warning says what is missing, and the engine stays paused.
    """
    chosen = _checked(tags)
    asleep = [tag for tag in chosen if tag in core.executor.sleeping_tags]
    if asleep:
        core.executor.wake_up(asleep)
    if SCHEDULING not in chosen:
        return
    if tags is None and not core.executor.sleep_state.is_awake:
        state = core.executor.sleep_state.state
        missing = ", ".join(f"{tag}: {each.value}" for tag, each in state.items())
        _logger.warning(
            "scheduling stays paused (%s): reload the weights, then wake up %s", missing, SCHEDULING
        )
        return
    core.resume()


def _checked(tags: Iterable[str] | None) -> tuple[str, ...]:
    if tags is None:
        return ALL_TAGS
    chosen = (tags,) if isinstance(tags, str) else tuple(dict.fromkeys(tags))
    if not chosen or not set(chosen) <= set(ALL_TAGS):
        raise InvalidRequestError(
            f"tags must be some of {', '.join(ALL_TAGS)}, not {list(chosen)!r}",
            field="tags",
            value=chosen,
        )
    return chosen
