"""A function compiled for some shapes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class CompiledShapes:
    """A function that is compiled for some shapes: its own code runs the others. ``missed`` counts
    those. Raises ValueError for a shape of what is no parameter of the function.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        compiled: Callable[..., Any],
        shapes: Sequence[Mapping[str, int]],
    ) -> None:
        self.missed = 0
        self._function = function
        self._compiled = compiled
        self._signature = inspect.signature(function)
        self._shapes = [dict(shape) for shape in shapes]
        for name in sorted({name for shape in self._shapes for name in shape}):
            if name not in self._signature.parameters:
                raise ValueError(f"{function!r} has no parameter {name!r} to be compiled for")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what serves the shapes of the arguments."""
        given = self._signature.bind(*args, **kwargs).arguments
        for shape in self._shapes:
            if all(_size(given.get(name)) == size for name, size in shape.items()):
                return self._compiled(*args, **kwargs)
        self.missed += 1
        return self._function(*args, **kwargs)


def _size(argument: Any) -> int | None:
    """Return the first dimension of a tensor, None for what has none or was left out."""
    shape = getattr(argument, "shape", None)
    return int(shape[0]) if shape else None
