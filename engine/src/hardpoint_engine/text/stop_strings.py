"""Stop strings: found in text that arrives in pieces, the same wherever the pieces are cut."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen


@frozen
class StopMatch:
    """``stop`` was found: the text ends at position ``begin``, or at ``end`` if it includes it."""

    stop: str
    begin: int
    end: int


class StopStrings:
    """The stop strings of one request."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))

    def find(self, text: str, seen: int) -> StopMatch | None:
        """Return the stop string that ends first after the ``seen`` first characters.

        Of several that end there, the longest.
        """
        found = None
        for stop in self._stops:
            begin = text.find(stop, max(0, seen - len(stop) + 1))
            if begin < 0:
                continue
            match = StopMatch(stop, begin, begin + len(stop))
            if found is None or (match.end, match.begin) < (found.end, found.begin):
                found = match
        return found

    def held(self, text: str) -> int:
        """Return how many characters at the end of ``text`` may begin a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
