"""The forward context: what the layers of a model may know about the step that they are part of.

The runner makes one record a step and hands it to the model as its ``step`` argument; code below
that gets no such argument (a plugin's layer, a foreign model) reads the entered one with
:func:`current`. The variable belongs to the thread or task that entered it: two engines in one
process never see each other's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen
from hardpoint.errors import CancelledStepError, LifecycleError

if TYPE_CHECKING:
    from torch import nn

    from hardpoint_runtime.attention.metadata import AttentionMetadata
    from hardpoint_runtime.graphs.keys import BatchKey
    from hardpoint_runtime.memory.kv_cache import LayerCache
    from hardpoint_runtime.memory.workspace import Workspace
    from hardpoint_runtime.token_counts import TokenCounts


def _never() -> bool:
    return False


@frozen(kw_only=True)
class ForwardContext:
    """One step as the layers see it.

    ``attention`` (which has the cache slots too) and ``kv_caches`` are by layer name; layers of one
    KV cache group share their metadata object. ``layers`` are the model's modules by name, the same
    in every step.

    ``graph_mode`` is the name of the mode this step runs in, ``batch_key`` the graph's key, None
    where none is replayed. Tokens from ``num_tokens`` on are padding; None: there is none.
    ``skip_compiled``: run the model's own code instead of what was compiled. ``token_counts`` are
    those of all data-parallel copies of the model, None if there is one.

    ``active_loras`` maps the adapters of this batch to the slots that hold them,
    ``multimodal_spans`` a request to the (begin, end) in this step's tokens of embeddings that are
    no tokens', ``connector_role`` is what this worker's KV connector does in this step, None
    without one. ``workspace`` is scratch memory for operations.

    ``extra`` is the platform's own (:meth:`hardpoint.platform.Platform.context`) merged with that
    of plugins. ``cancelled()`` turns true when the driver wants the step to end.
    """

    attention: Mapping[str, AttentionMetadata] = field(factory=dict)
    kv_caches: Mapping[str, LayerCache] = field(factory=dict)
    layers: Mapping[str, nn.Module] = field(factory=dict, repr=False)
    graph_mode: str = "NONE"
    batch_key: BatchKey | None = None
    num_tokens: int | None = None
    skip_compiled: bool = False
    token_counts: TokenCounts | None = None
    active_loras: Mapping[str, int] = field(factory=dict)
    multimodal_spans: Mapping[str, Sequence[tuple[int, int]]] = field(factory=dict)
    connector_role: str | None = None
    workspace: Workspace | None = field(default=None, repr=False)
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


@contextlib.contextmanager
def overridden(**changes: Any) -> Iterator[ForwardContext]:
    """Make the current context with these ``changes`` of its attributes the current one inside.
    Raises LifecycleError outside one.
    """
    with entered(evolve(current(), **changes)) as context:
        yield context


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
