"""Which batches an operation of attention can serve inside a FULL graph: declared where it is
written, read where the mode is resolved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from hardpoint_runtime.graphs.resolution import AttentionSupport

if TYPE_CHECKING:
    from hardpoint_runtime.operations import Operations

SPLIT_AT = ("kv_write", "attention")
"""The operations whose work may depend on the lengths of a step's requests: PIECEWISE leaves them
eager, FULL needs their support.
"""

_Function = TypeVar("_Function", bound=Callable[..., object])


def graph_support(level: AttentionSupport) -> Callable[[_Function], _Function]:
    """Declare that the decorated operation does the same work for every batch of one shape, of the
    kinds that ``level`` says, where :attr:`AttentionMetadata.fixed` is set.

    An operation that declares nothing supports FULL graphs never.
    """

    def declare(function: _Function) -> _Function:
        function.graph_support = level  # type: ignore[attr-defined]
        return function

    return declare


def attention_support(operations: Operations) -> AttentionSupport:
    """Return what all of :data:`SPLIT_AT` support, as resolved for this worker."""
    return AttentionSupport.least(
        getattr(getattr(operations, name), "graph_support", AttentionSupport.NEVER)
        for name in SPLIT_AT
    )
