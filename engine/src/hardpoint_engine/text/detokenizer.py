"""Token ids to text, piece by piece: never half a character, and the pieces join to the whole.

One per request, on the thread that takes the engine's outputs. Two kinds: vocabularies whose tokens
are byte strings are decoded byte by byte, exactly; any other by comparing the text of a sliding
window of ids before and after.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MOST_BYTES_OF_A_CHARACTER = 4


class Detokenizer(ABC):
    """The text of one growing sequence of ids."""

    @abstractmethod
    def add(self, token_id: int) -> str:
        """Return the text that became certain with this id: "" while a character is incomplete."""

    @abstractmethod
    def finish(self) -> str:
        """Return what is left at the end of the sequence; an incomplete character as U+FFFD."""


class ByteDetokenizer(Detokenizer):
    """For vocabularies in which every token is a string of UTF-8 bytes, whole characters or not.

    ``token_bytes`` gives an id's bytes, b"" for one that is not shown.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        """Decode the id's bytes as far as they are whole characters."""
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """Give up on the bytes that are left."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer(Detokenizer):
    """For vocabularies whose text depends on neighbours (joining spaces, byte fallback).

    The ids since the last safe point but one give the context that the decoder needs; what they
    decode to beyond the text already given is new. Text that ends in U+FFFD is kept back while it
    may still become a character.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._given = 0  # ids of the window whose text is given out

    def add(self, token_id: int) -> str:
        """Decode the window with the id."""
        self._window.append(token_id)
        pending = len(self._window) - self._given
        return self._take(final=pending > MOST_BYTES_OF_A_CHARACTER)

    def finish(self) -> str:
        """Take the window's text as it is."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._decode(self._window[: self._given])
        now = self._decode(self._window)
        if not final and now.endswith(REPLACEMENT):
            return ""
        self._window = self._window[self._given :]
        self._given = len(self._window)
        return now[len(before) :]
