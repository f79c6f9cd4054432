"""The forward context: what the layers of a model may know about the step that they are part of.

The runner makes one record a step and hands it to the model as its ``step`` argument; code below
that gets no such argument (a plugin's layer, a foreign model) reads the entered one with
:func:`current`. The variable belongs to the thread or task that entered it: two engines in one
process never see each other's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING

from attrs import field, frozen
from hardpoint.errors import CancelledStepError, LifecycleError

if TYPE_CHECKING:
    from hardpoint_runtime.attention.metadata import AttentionMetadata
    from hardpoint_runtime.memory.kv_cache import LayerCache


def _never() -> bool:
    return False


@frozen(kw_only=True)
class ForwardContext:
    """One step as the layers see it.

    ``attention`` and ``kv_caches`` are by layer name; layers of one KV cache group share their
    metadata object. ``graph_mode`` is the name of the mode this step runs in. ``extra`` is the
    platform's own (:meth:`hardpoint.platform.Platform.context`) merged with that of plugins.
    ``cancelled()`` turns true when the driver wants the step to end.
    """

    attention: Mapping[str, AttentionMetadata] = field(factory=dict)
    kv_caches: Mapping[str, LayerCache] = field(factory=dict)
    graph_mode: str = "NONE"
    step_id: int = -1
    extra: Mapping[str, object] = field(factory=dict)
    cancelled: Callable[[], bool] = field(default=_never, eq=False, repr=False)

    def raise_if_cancelled(self) -> None:
        """Raise CancelledStepError if the driver wants this step to end. Called between layers."""
        if self.cancelled():
            raise CancelledStepError(f"step {self.step_id} was ended by the driver between layers")


_current: ContextVar[ForwardContext] = ContextVar("hardpoint_forward_context")


@contextlib.contextmanager
def entered(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make ``context`` the current one inside; the previous is back afterwards, also after an
    exception.
    """
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


def current() -> ForwardContext:
    """Return the context entered last in this thread or task. Raises LifecycleError outside one."""
    context = _current.get(None)
    if context is None:
        raise LifecycleError(
            "no forward context here: a layer that reads its step must run inside "
            "hardpoint_runtime.forward_context.entered(...)"
        )
    return context


def is_entered() -> bool:
    """Whether :func:`current` would find a context."""
    return _current.get(None) is not None
