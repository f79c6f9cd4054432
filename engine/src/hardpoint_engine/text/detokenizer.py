"""Token ids to text, piece by piece: never half a character, and the pieces join to the whole.

One per request, on the thread that takes the engine's outputs. Two kinds: vocabularies whose tokens
are byte strings are decoded byte by byte, exactly; any other by comparing the text of a sliding
window of ids before and after.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence

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

    ``token_bytes`` gives an id's bytes, b"" for one that is not shown. With ``drops_space`` a space
    at the very beginning is left out. Bytes that are no UTF-8 become U+FFFD: one for each run that
    could have begun a character or, with ``each``, one for each byte.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        *,
        drops_space: bool = False,
        each: bool = False,
    ) -> None:
        self._token_bytes = token_bytes
        self._drops_space = drops_space
        self._each = each
        self._rest = b""

    def add(self, token_id: int) -> str:
        """Decode the id's bytes as far as they are whole characters."""
        return self._take(self._token_bytes(token_id), final=False)

    def finish(self) -> str:
        """Give up on the bytes that are left."""
        return self._take(b"", final=True)

    def _take(self, more: bytes, *, final: bool) -> str:
        text, self._rest = self._decoded(self._rest + more, final)
        if text and self._drops_space:
            self._drops_space = False
            text = text.removeprefix(" ")
        return text

    def _decoded(self, data: bytes, final: bool) -> tuple[str, bytes]:
        """Return the text of the bytes, and those at the end that may yet become a character."""
        found = []
        while True:
            try:
                found.append(data.decode())
            except UnicodeDecodeError as error:
                found.append(data[: error.start].decode())
                if error.end == len(data) and not final and _may_go_on(error):
                    return "".join(found), data[error.start :]
                found.append(REPLACEMENT * (error.end - error.start if self._each else 1))
                data = data[error.end :]
            else:
                return "".join(found), b""


def _may_go_on(error: UnicodeDecodeError) -> bool:
    return error.reason == "unexpected end of data"


class WindowDetokenizer(Detokenizer):
    """For vocabularies whose text depends on neighbours (joining spaces, byte fallback).

    The ids since the last safe point but one give the context that the decoder needs; what they
    decode to beyond the text already given is new. Text that ends in U+FFFD is kept back while it
    may still become a character. ``hidden`` ids have no text and are no context.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], hidden: Container[int] = frozenset()
    ) -> None:
        self._decode = decode
        self._hidden = hidden
        self._window: list[int] = []
        self._given = 0  # ids of the window whose text is given out

    def add(self, token_id: int) -> str:
        """Decode the window with the id."""
        if token_id in self._hidden:
            return ""
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
