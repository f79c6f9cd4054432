"""PIECEWISE: a forward as recorded segments with eager attention between them.

A model of L attention layers gives 2 * L + 1 pieces: L + 1 segments, each a graph of the device,
and between two of them the eager calls of one layer's attention, which see each step's own
metadata. The split needs no compiler: the recorder ends a segment where a model calls an operation
of :data:`SPLIT_AT`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, frozen

from hardpoint_runtime.attention.metadata import AttentionMetadata
from hardpoint_runtime.graphs.errors import GraphCaptureError
from hardpoint_runtime.graphs.recorded import GraphPool, Memory, RecordedGraph
from hardpoint_runtime.graphs.recording import Entry, Recording, cut
from hardpoint_runtime.graphs.support import SPLIT_AT
from hardpoint_runtime.graphs.torch_operations import tensors_in

if TYPE_CHECKING:
    from hardpoint_runtime.device import DeviceOps
    from hardpoint_runtime.operations import Operations

Attention = Mapping[str, AttentionMetadata]
"""Layer name -> its metadata in one step."""


def split_operations(operations: Operations) -> Operations:
    """Return the operations with those of :data:`SPLIT_AT` cut out of recordings. Called by the
    runner before the model is built, where graphs may be of pieces.
    """
    changes: dict[str, Any] = {name: _cut(getattr(operations, name)) for name in SPLIT_AT}
    return evolve(operations, **changes)


def _cut(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def call(*args: Any, **kwargs: Any) -> Any:
        return cut(operation, *args, **kwargs)

    return call


@frozen(kw_only=True)
class LayerMetadata:
    """Stands in a call for the metadata that ``layer`` has in the step at hand."""

    layer: str


@frozen(kw_only=True, eq=False)
class EagerCall:
    """A call made anew at each replay. ``results`` is where later segments read its tensors."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[torch.Tensor | None, ...]

    def run(self, attention: Attention) -> None:
        """Call with this step's metadata."""
        kwargs = {name: _filled(value, attention) for name, value in self.kwargs.items()}
        found = self.function(*(_filled(value, attention) for value in self.args), **kwargs)
        if self.results:
            for place, tensor in zip(self.results, tensors_in(found), strict=True):
                if place is not None:
                    place.copy_(tensor)


@frozen(kw_only=True, eq=False)
class EagerPiece:
    """What lies between two segments: one layer's attention."""

    calls: tuple[EagerCall, ...]


@frozen(kw_only=True, eq=False)
class Segment:
    """One graph of the device, captured from ``num_operations`` calls."""

    key: Hashable
    graph: Any
    num_operations: int


@frozen(kw_only=True, eq=False)
class PiecewiseGraph:
    """The pieces in order, and the result that the last segment leaves in place."""

    key: Hashable
    pieces: tuple[Segment | EagerPiece, ...]
    output: Any

    def replay(
        self, device: DeviceOps, attention: Attention, raise_if_cancelled: Callable[[], None]
    ) -> Any:
        """Run the pieces in order; return :attr:`output`. ``raise_if_cancelled`` is called before
        each eager piece.
        """
        for piece in self.pieces:
            if isinstance(piece, Segment):
                device.before_replay(piece.key, attention)
                device.replay(piece.graph)
                continue
            raise_if_cancelled()
            for call in piece.calls:
                call.run(attention)
        return self.output


def capture_pieces(
    recording: Recording,
    key: Hashable,
    attention: Attention,
    device: DeviceOps,
    pool: Any,
    scratch: GraphPool,
) -> PiecewiseGraph:
    """Make the graph of a recording with cuts, made with the metadata ``attention``.

    ``scratch`` holds what the pieces hand on; ``pool`` is the device's for its graphs. Segment i
    has the key ``(key, i)``. Raises GraphCaptureError if nothing was cut out, and what the device
    raises.
    """
    layers = {id(metadata): layer for layer, metadata in attention.items()}
    memory = Memory.lay_out(recording, scratch)
    pieces: list[Segment | EagerPiece] = []
    for eager, group in itertools.groupby(memory.entries, lambda entry: entry.eager):
        entries = tuple(group)
        if eager:
            calls = tuple(_eager_call(entry, memory, layers) for entry in entries)
            pieces.append(EagerPiece(calls=calls))
            continue
        place = (key, len(pieces))
        recorded = RecordedGraph(key=place, work=memory.work(entries), output=None)
        graph = device.capture(recorded.replay, place, pool=pool)
        pieces.append(Segment(key=place, graph=graph, num_operations=len(recorded.work)))
    if not any(isinstance(piece, EagerPiece) for piece in pieces):
        raise GraphCaptureError(
            "the model cannot be split: its layers call none of the operations "
            f"{', '.join(SPLIT_AT)}"
        )
    return PiecewiseGraph(key=key, pieces=tuple(pieces), output=memory.output)


def _eager_call(entry: Entry, memory: Memory, layers: Mapping[int, str]) -> EagerCall:
    results = memory.results(entry)
    return EagerCall(
        function=entry.function,
        args=tuple(_named(value, layers) for value in memory.moved(entry.args)),
        kwargs={
            name: _named(value, layers) for name, value in memory.moved(dict(entry.kwargs)).items()
        },
        results=results if any(place is not None for place in results) else (),
    )


def _named(value: Any, layers: Mapping[int, str]) -> Any:
    if not isinstance(value, AttentionMetadata):
        return value
    if id(value) not in layers:
        raise GraphCaptureError("an attention layer uses metadata that is not of this step")
    return LayerMetadata(layer=layers[id(value)])


def _filled(value: Any, attention: Attention) -> Any:
    return attention[value.layer] if type(value) is LayerMetadata else value
