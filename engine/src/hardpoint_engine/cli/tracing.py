"""``--trace FILE.json`` of the commands that start an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hardpoint_engine.temporary_extension import TemporaryExtension
from hardpoint_engine.timeline.extension import MODULE, NAME
from hardpoint_engine.timeline.timeline import Timeline

if TYPE_CHECKING:
    from hardpoint_engine.core import EngineCore

Watch = Callable[["EngineCore"], contextlib.AbstractContextManager[None]]


@contextmanager
def tracing(path: str | None) -> Iterator[Watch]:
    """Give a context in which an engine that is started within this one is watched; the trace is
    complete when both have ended. Does nothing for None. Raises InvalidRequestError if ``path``
    cannot be written.
    """
    if path is None:
        yield lambda core: contextlib.nullcontext()
        return
    timeline = Timeline(path)
    with contextlib.closing(timeline), TemporaryExtension(NAME, MODULE):
        yield lambda core: _watched(core, timeline)


@contextmanager
def _watched(core: EngineCore, timeline: Timeline) -> Iterator[None]:
    core.watch(timeline)
    try:
        yield
    except Exception:
        core.watch(None)
        timeline.collect(core)
        raise
    except BaseException:  # time is short: the workers may be in a step
        core.watch(None)
        timeline.lacks_workers("the run was interrupted")
        raise
    core.watch(None)
    timeline.collect(core)
