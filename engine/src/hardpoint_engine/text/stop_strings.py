"""Stop strings: found in text that arrives in pieces, the same wherever the pieces are cut.

Each stop string knows how much of its beginning ends the text (Knuth, Morris and Pratt's matching,
their table made only as far as the text has matched): work and memory for a piece are linear in the
piece, however long the text and the stop strings are.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field, frozen


@frozen
class StopMatch:
    """``stop`` was found: the text ends at position ``begin``, or at ``end`` if it includes it."""

    stop: str
    begin: int
    end: int


class StopStrings:
    """The stop strings of one request, and how far its text has come."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._progress = [_Progress(stop) for stop in dict.fromkeys(stops)]
        self._length = 0

    def add(self, piece: str) -> StopMatch | None:
        """Take the next piece of the text; return the stop string that ends first in it.

        Of several that end there, the longest. Positions are those in the whole text.
        """
        found = None
        for progress in self._progress:
            end = progress.add(piece)
            if end is None:
                continue
            end += self._length
            match = StopMatch(progress.stop, end - len(progress.stop), end)
            if found is None or (match.end, match.begin) < (found.end, found.begin):
                found = match
        self._length += len(piece)
        return found

    @property
    def held(self) -> int:
        """How many characters at the end of the text may begin a stop string."""
        return max((progress.matched for progress in self._progress), default=0)


@define
class _Progress:
    """``matched``: the length of the longest proper beginning of ``stop`` that ends the text.

    ``_shorter[m - 1]`` is that of the text ``stop[:m]``, for m up to the longest match so far.
    """

    stop: str
    matched: int = 0
    _shorter: list[int] = field(factory=lambda: [0])

    def add(self, piece: str) -> int | None:
        """Take a piece in; return where in it ``stop`` ended first."""
        stop, matched, first, index = self.stop, self.matched, None, 0
        while index < len(piece):
            if not matched:
                index = piece.find(stop[0], index)
                if index < 0:
                    break
            character = piece[index]
            while matched and stop[matched] != character:
                matched = self._shorter[matched - 1]
            matched += stop[matched] == character
            index += 1
            if matched > len(self._shorter):
                self._extend()
            if matched == len(stop):
                first = index if first is None else first
                matched = self._shorter[matched - 1]
        self.matched = matched
        return first

    def _extend(self) -> None:
        """Add the next entry of the table."""
        character = self.stop[len(self._shorter)]
        shorter = self._shorter[-1]
        while shorter and self.stop[shorter] != character:
            shorter = self._shorter[shorter - 1]
        self._shorter.append(shorter + (self.stop[shorter] == character))
