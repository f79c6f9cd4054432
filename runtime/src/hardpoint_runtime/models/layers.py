"""The parts that decoder models share. Each holds its weights and calls named operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from attrs import evolve, frozen
from hardpoint.errors import UnsupportedError
from torch import nn

from hardpoint_runtime.operations import Operations
from hardpoint_runtime.parallel.communicator import Communicator
from hardpoint_runtime.parallel.spans import Span
from hardpoint_runtime.parallel.spans import whole as whole_span
from hardpoint_runtime.quantization.packed_form import StoredRows, form_of

Filling = torch.Tensor | StoredRows
"""What a weight comes as: numbers, or rows as a file has them packed."""


@frozen(kw_only=True, eq=False)
class Slot:
    """Where one weight of a checkpoint goes, or the part of it that this rank holds.

    ``shape`` is the checkpoint's, whole. ``held`` is this rank's part of it, a slice for each
    dimension; empty: all. ``runs``, where it is several runs of rows: those instead, in their
    order. It is in ``parameter``, in the rows from ``start`` on (:meth:`view`), with ``offset``
    added.
    """

    module: nn.Module
    parameter: str
    start: int
    shape: tuple[int, ...]
    held: tuple[slice, ...] = ()
    runs: tuple[slice, ...] = ()
    offset: float = 0.0

    def part_of(self, tensor: Filling) -> Filling:
        """Return this rank's part of ``tensor``, which is whole."""
        if isinstance(tensor, StoredRows):
            return tensor.part(self.runs or self.held[:1] or (slice(None),))
        if self.runs:
            return torch.cat([tensor[run] for run in self.runs])
        return tensor[self.held] if self.held else tensor

    def view(self) -> torch.Tensor:
        """Return the memory of what this rank holds."""
        if form_of(self.module, self.parameter) is not None:
            raise UnsupportedError(
                "the memory of one weight", "a model whose weights are held packed",
                reason=f"{self.parameter} of {type(self.module).__name__} is",
                hint="Leave out quantization; for a GGUF file, name the dtype: dtype = 'float32'.",
            )  # fmt: skip
        runs = self.runs or self.held[:1]
        rows = sum(run.stop - run.start for run in runs) if runs else (self.shape or (1,))[0]
        memory: torch.Tensor = getattr(self.module, self.parameter)
        return memory.narrow(0, self.start, rows) if self.shape else memory

    def fill(self, tensor: Filling) -> None:
        """Copy this rank's part of ``tensor``, which is whole, there, converting its dtype and
        moving it to the parameter's device; or pack it, where the parameter is packed.
        """
        part = self.part_of(tensor)
        form = form_of(self.module, self.parameter)
        if form is not None:
            form.pack(self.module.get_parameter(self.parameter), self.start, part)
            return
        if isinstance(part, StoredRows):
            raise UnsupportedError(
                f"rows of {part.kind}", f"a parameter of {type(self.module).__name__}",
                reason="it holds numbers",
            )  # fmt: skip
        with torch.no_grad():
            memory = self.view()
            memory.copy_(part)
            if self.offset:
                memory.add_(self.offset)


class Projection(nn.Module):
    """One or several linear layers of equal input as one: their outputs side by side.

    ``parts`` maps each layer's name in the checkpoint to its outputs; ``inputs`` and outputs are
    numbers, or the spans of them that this rank computes. Of outputs that are spans this rank's
    come out. Of inputs that are a span this rank's products are a part of the sum: ``group`` adds
    those of the others. ``packed``: the name of the one layer that the checkpoint has instead, its
    outputs those of the parts side by side.
    """

    packable: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(
        self,
        inputs: int | Span,
        parts: Mapping[str, int | Span],
        *,
        bias: bool,
        operations: Operations,
        group: Communicator | None = None,
        packed: str | None = None,
    ) -> None:
        super().__init__()
        self.packed = packed
        self.inputs = _span(inputs)
        self.parts = {name: _span(outputs) for name, outputs in parts.items()}
        outputs = sum(part.size for part in self.parts.values())
        self.weight = nn.Parameter(torch.empty(outputs, self.inputs.size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None
        self._linear = operations.linear
        self._group = None if self.inputs.is_whole else group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, outputs] of ``x`` [T, inputs]."""
        if self._group is None:
            return self._product(x, self.bias)
        total = self._group.all_reduce(self._product(x, None))
        return total if self.bias is None else total.add_(self.bias)

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        form = form_of(self, "weight")
        if form is None:
            return self._linear(x, self.weight, bias)
        return form.linear(self.weight, x, bias)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Return the checkpoint's names below ``prefix``."""
        parameters = ("weight", "bias") if self.bias is not None else ("weight",)
        if self.packed is not None:
            return {f"{prefix}{self.packed}.{each}": self._packed_slot(each) for each in parameters}
        found = {}
        start = 0
        for name, outputs in self.parts.items():
            for parameter in parameters:
                spans = (outputs, self.inputs) if parameter == "weight" else (outputs,)
                found[f"{prefix}{name}.{parameter}"] = _slot(self, parameter, start, spans)
            start += outputs.size
        return found

    def _packed_slot(self, parameter: str) -> Slot:
        """Return the slot of this rank's rows of all parts in the checkpoint's one matrix."""
        runs, first = [], 0
        for part in self.parts.values():
            runs.append(slice(first + part.start, first + part.stop))
            first += part.total
        shape = (first, self.inputs.total) if parameter == "weight" else (first,)
        return Slot(module=self, parameter=parameter, start=0, shape=shape, runs=tuple(runs))


class Norm(nn.Module):
    """The scale of an RMS norm, and its epsilon. The scale is what the checkpoint has plus
    ``offset``; with one it is kept in float32, as the sum needs more digits than its parts.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.weight_dtype = torch.float32 if offset else None
        self.eps = eps
        self.offset = offset

    def slots(self, name: str) -> dict[str, Slot]:
        """Return the checkpoint's name of the scale."""
        return {f"{name}.weight": evolve(whole(self), offset=self.offset)}


class Embedding(nn.Module):
    """Token embeddings [V, H], which may serve as the output projection too.

    ``rows`` is a number, or the spans of the vocabulary that the ranks of ``group`` hold, in their
    order, this rank's at ``index``.
    """

    packable: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(
        self,
        rows: int | Sequence[Span],
        size: int,
        *,
        index: int = 0,
        group: Communicator | None = None,
    ) -> None:
        super().__init__()
        spans = [whole_span(rows)] if isinstance(rows, int) else list(rows)
        self.rows = spans[index]
        self.sizes = tuple(span.size for span in spans)
        self.size = size
        self.weight = nn.Parameter(torch.empty(self.rows.size, size), requires_grad=False)
        self._group = None if self.rows.is_whole else group

    def look_up(self, token_ids: torch.Tensor, operations: Operations) -> torch.Tensor:
        """Return the embeddings [T, H] of ``token_ids`` [T]."""
        if self._group is None:
            return self._rows(token_ids, operations)
        places = token_ids - self.rows.start
        outside = (places < 0) | (places >= self.rows.size)
        found = self._rows(places.masked_fill(outside, 0), operations)
        return self._group.all_reduce(found.masked_fill(outside[:, None], 0))

    def _rows(self, places: torch.Tensor, operations: Operations) -> torch.Tensor:
        form = form_of(self, "weight")
        if form is None:
            return operations.embedding(places, self.weight)
        return form.look_up(self.weight, places)

    def logits(self, hidden: torch.Tensor, operations: Operations) -> torch.Tensor:
        """Return float32 logits [n, V] of ``hidden`` [n, H], the same bits on every rank."""
        form = form_of(self, "weight")
        if form is None:
            logits = operations.linear(hidden, self.weight, None).float()
        else:
            logits = form.linear(self.weight, hidden, None).float()
        return logits if self._group is None else self._group.all_gather(logits, self.sizes, -1)

    def slots(self, name: str) -> dict[str, Slot]:
        """Return the checkpoint's name of the rows."""
        return {f"{name}.weight": _slot(self, "weight", 0, (self.rows, whole_span(self.size)))}


def whole(module: nn.Module) -> Slot:
    """Return the slot of all of ``module.weight``."""
    shape = tuple(module.get_parameter("weight").shape)
    return Slot(module=module, parameter="weight", start=0, shape=shape)


def _span(size: int | Span) -> Span:
    return whole_span(size) if isinstance(size, int) else size


def _slot(module: nn.Module, parameter: str, start: int, spans: Sequence[Span]) -> Slot:
    return Slot(
        module=module,
        parameter=parameter,
        start=start,
        shape=tuple(span.total for span in spans),
        held=() if all(span.is_whole for span in spans) else tuple(span.slice for span in spans),
    )


def merged(parts: Sequence[Mapping[str, Slot]]) -> dict[str, Slot]:
    """Return the union of ``parts``."""
    return {name: slot for part in parts for name, slot in part.items()}
