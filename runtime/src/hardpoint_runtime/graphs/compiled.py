"""A function compiled for some shapes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class CompiledShapes:
    """A function that is compiled for some shapes: its own code runs the others. ``missed`` counts
    those.
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what serves the shapes of the arguments."""
        given = self._signature.bind(*args, **kwargs).arguments
        for shape in self._shapes:
            if all(given[name].shape[0] == size for name, size in shape.items()):
                return self._compiled(*args, **kwargs)
        self.missed += 1
        return self._function(*args, **kwargs)
