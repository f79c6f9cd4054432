"""The grammar of one answer, as the engine sees it; what compiles it is a library's business."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Self

from hardpoint.errors import HardpointError


class GrammarError(HardpointError):
    """A grammar failed while an answer was generated: it grew too complex, or a token came that it
    had forbidden.

    What to do: simplify the schema or expression; the other requests are not touched.
    """


class Grammar(ABC):
    """Which tokens may come next in one answer. Used by one thread at a time, in the driver."""

    @abstractmethod
    def start(self) -> Self:
        """Return a grammar of the same form at its beginning, for another answer."""

    @abstractmethod
    def mask(self) -> bytes:
        """Return which tokens may come: ceil(vocabulary / 32) little-endian 32-bit words, bit = 1
        allowed. Raises GrammarError.
        """

    @abstractmethod
    def accept(self, tokens: Iterable[int]) -> None:
        """Take in what came. Raises GrammarError for what may not come."""

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether nothing but the end can follow."""
