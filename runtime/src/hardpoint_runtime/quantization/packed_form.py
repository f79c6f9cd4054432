"""What the bytes of a packed matrix are. A module holds them as a flat parameter of uint8 under the
name that the matrix has, and beside it the form, found by :func:`form_of`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

SLAB = 4 << 20
"""Numbers of a matrix that are unpacked at once."""
FORMS = "packed_forms"
"""The attribute of a module: name of a parameter -> form."""


@frozen(kw_only=True)
class PackedPart:
    """Rows from ``first`` on of a matrix, packed as ``kind``, a name of whoever packs them. They
    are ``num_bytes`` from ``offset`` on of the parameter.
    """

    kind: str
    first: int
    rows: int
    offset: int
    num_bytes: int


@frozen(kw_only=True, eq=False)
class StoredRows:
    """Rows as a file has them packed: ``data`` uint8 [rows, bytes of a row], of the GGUF type
    ``kind``, ``cols`` numbers each.
    """

    kind: str
    cols: int
    data: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """That of the numbers."""
        return len(self.data), self.cols

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.data.nbytes

    def part(self, rows: Sequence[slice]) -> StoredRows:
        """Return those rows, all columns, in that order."""
        if len(rows) == 1:
            return evolve(self, data=self.data[rows[0]])
        return evolve(self, data=torch.cat([self.data[each] for each in rows]))


class PackedForm(ABC):
    """A matrix [rows, cols] in ``parts``, rows below each other. Used in the worker.

    ``memory`` is the module's parameter in every method. What is not one call of the platform's
    own goes through :meth:`unpack`: the reference of its kernels, exact and slow. ``dtype``: what
    the model computes in.
    """

    def __init__(
        self, rows: int, cols: int, parts: Sequence[PackedPart], dtype: torch.dtype
    ) -> None:
        self.rows, self.cols, self.parts, self.dtype = rows, cols, tuple(parts), dtype
        self.num_bytes = max(part.offset + part.num_bytes for part in self.parts)

    @abstractmethod
    def takes_stored(self, first: int, kind: str | None) -> bool:
        """Whether the rows of the part at ``first`` are packed from what a file of that GGUF type
        has as it is.
        """

    @abstractmethod
    def pack(self, memory: Tensor, first: int, rows: Tensor | StoredRows) -> None:
        """Pack ``rows`` as those from ``first`` on: numbers [n, cols], or what a file has."""

    @abstractmethod
    def unpack(self, memory: Tensor, first: int, count: int) -> Tensor:
        """Return ``count`` rows from ``first`` on as float32 [count, cols]."""

    def linear(self, memory: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x`` [T, cols] times the matrix transposed, plus ``bias``: [T, rows]."""
        step = max(1, SLAB // self.cols)
        wide = x.float()
        slabs = [
            wide @ self.unpack(memory, first, min(step, self.rows - first)).t()
            for first in range(0, self.rows, step)
        ]
        out = torch.cat(slabs, -1).to(x.dtype)
        return out if bias is None else out.add_(bias)

    def look_up(self, memory: Tensor, ids: Tensor) -> Tensor:
        """Return rows ``ids`` [T] as [T, cols], of ``dtype``."""
        distinct, places = torch.unique(ids, return_inverse=True)
        rows = [self.unpack(memory, int(each), 1) for each in distinct.tolist()]
        if not rows:
            return torch.empty(0, self.cols, dtype=self.dtype)
        return torch.cat(rows).to(self.dtype).index_select(0, places)

    def dense(self, memory: Tensor) -> Tensor:
        """Return the whole matrix as float32 [rows, cols]."""
        return self.unpack(memory, 0, self.rows)


def form_of(module: nn.Module, parameter: str) -> PackedForm | None:
    """Return the form of a module's packed matrix; None if it is held as numbers."""
    forms: dict[str, PackedForm] = vars(module).get(FORMS, {})
    return forms.get(parameter)


def hold_packed(module: nn.Module, parameter: str, form: PackedForm, memory: Tensor) -> None:
    """Have ``module`` hold a matrix packed in ``memory``, uint8 [form.num_bytes]."""
    vars(module).setdefault(FORMS, {})[parameter] = form
    module.register_parameter(parameter, nn.Parameter(memory, requires_grad=False))
