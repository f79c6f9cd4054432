"""What is kept for each request as arrays: declared once, then cleared, gathered and padded alike.

A request owns one *slot* for life; its values never move, so they cannot leak to a neighbour. A
step gathers the slots that it needs, in any order, into fresh arrays. All of it is host memory
(numpy): the runner copies what it gathered to the device in one go.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, field, frozen
from hardpoint.errors import HardpointError

if TYPE_CHECKING:
    from hardpoint.messages import NewRequestData

Array = np.ndarray[Any, Any]


class ColumnError(HardpointError):
    """A column is declared twice, unknown, or its default or pad value does not fit its dtype.

    What to do: correct the column that the message names, in the plugin that offers it.
    """


@frozen(kw_only=True)
class Column:
    """One value per request, or one fixed-width row of values.

    ``dtype`` is a numpy dtype's name, ``shape`` that of one request's value (() for a scalar).
    ``default`` is what an unused slot holds; ``pad`` is what a padding row of a batch holds, chosen
    so that the row is inert. Both are mandatory: whoever adds a column has to think of them.
    ``read(request)`` gives a new request's value, None where the default stands.
    """

    name: str
    dtype: str
    default: Any
    pad: Any
    shape: tuple[int, ...] = ()
    read: Callable[[NewRequestData], Any] | None = field(default=None, eq=False)

    def __attrs_post_init__(self) -> None:
        for what, value in (("default", self.default), ("pad", self.pad)):
            try:
                fits = np.full(self.shape, value, dtype=self.dtype)
            except (TypeError, ValueError, OverflowError) as error:
                raise ColumnError(
                    f"column {self.name!r}: {what} {value!r} is no {self.dtype} of shape "
                    f"{self.shape}: {error}"
                ) from error
            if not np.array_equal(fits, np.broadcast_to(np.asarray(value), self.shape)):
                raise ColumnError(
                    f"column {self.name!r}: {what} {value!r} does not fit {self.dtype}"
                )


class Columns:
    """The arrays of all declared columns over ``capacity`` slots, and which slots are taken.

    ``columns[name]`` is the live array ``[capacity, *shape]``; it is replaced when the table grows,
    so do not keep it.
    """

    def __init__(self, declared: Iterable[Column], capacity: int) -> None:
        self._columns: dict[str, Column] = {}
        self._arrays: dict[str, Array] = {}
        self._capacity = capacity
        self._free = list(range(capacity))
        self._taken: set[int] = set()
        for column in declared:
            self.declare(column)

    @property
    def capacity(self) -> int:
        """How many slots there are."""
        return self._capacity

    @property
    def taken(self) -> frozenset[int]:
        """The slots in use."""
        return frozenset(self._taken)

    @property
    def declared(self) -> tuple[Column, ...]:
        """Every column, in the order of declaration."""
        return tuple(self._columns.values())

    def declare(self, column: Column) -> None:
        """Add a column; every slot holds its default. Raises ColumnError for a name that exists."""
        if column.name in self._columns:
            raise ColumnError(f"column {column.name!r} is declared twice")
        self._columns[column.name] = column
        self._arrays[column.name] = _filled(column, self._capacity)

    def resize(self, name: str, width: int) -> None:
        """Change the width of a one-dimensional column; values that still fit are kept."""
        column = evolve(self._column(name), shape=(width,))
        old, new = self._arrays[name], _filled(column, self._capacity)
        keep = min(width, old.shape[1])
        for slot in self._taken:
            new[slot, :keep] = old[slot, :keep]
        self._columns[name], self._arrays[name] = column, new

    def take(self) -> int:
        """Return the lowest free slot; the table doubles when none is left (preempted requests keep
        their slots, so there may be more requests than run at once).
        """
        if not self._free:
            self._grow(max(1, self._capacity) * 2)
        slot = heapq.heappop(self._free)
        self._taken.add(slot)
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back; all its columns hold their defaults again."""
        if slot not in self._taken:
            raise ColumnError(f"slot {slot} is not in use")
        self._taken.remove(slot)
        for name, column in self._columns.items():
            self._arrays[name][slot] = column.default
        heapq.heappush(self._free, slot)

    def fill(self, slot: int, request: NewRequestData) -> None:
        """Set every column that knows how to read a new request."""
        for name, column in self._columns.items():
            if column.read is not None and (value := column.read(request)) is not None:
                self._arrays[name][slot] = value

    def gather(self, name: str, slots: Array | Sequence[int], rows: int | None = None) -> Array:
        """Return a copy ``[rows, *shape]``: the values of ``slots`` in order, then pad values.

        ``rows`` None means as many as there are slots. The one place where rows are padded.
        """
        index = np.asarray(slots, dtype=np.int64)
        count = len(index)
        if rows is None or rows == count:
            return self._arrays[name][index]
        column = self._column(name)
        padded = np.full((rows, *column.shape), column.pad, dtype=column.dtype)
        padded[:count] = self._arrays[name][index]
        return padded

    def __getitem__(self, name: str) -> Array:
        self._column(name)
        return self._arrays[name]

    def _column(self, name: str) -> Column:
        try:
            return self._columns[name]
        except KeyError:
            known = ", ".join(self._columns)
            raise ColumnError(f"there is no column {name!r}; declared are: {known}") from None

    def _grow(self, capacity: int) -> None:
        for name, column in self._columns.items():
            larger = _filled(column, capacity)
            larger[: self._capacity] = self._arrays[name]
            self._arrays[name] = larger
        for slot in range(self._capacity, capacity):
            heapq.heappush(self._free, slot)
        self._capacity = capacity


def _filled(column: Column, capacity: int) -> Array:
    shape = (capacity, *column.shape)
    if not np.any(column.default):
        # Zero pages come from the system untouched: a wide column costs memory only where used.
        return np.zeros(shape, dtype=column.dtype)
    return np.full(shape, column.default, dtype=column.dtype)
