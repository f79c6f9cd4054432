"""How pieces of a vocabulary spell bytes: byte-level, or as SentencePiece does. Others do not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

if TYPE_CHECKING:
    import tokenizers

SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"
"""What stands for a space in SentencePiece vocabularies."""


def _alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(code): code for code in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


ALPHABET: Mapping[str, int] = MappingProxyType(_alphabet())
"""The alphabet of byte-level vocabularies: printable character -> the byte it stands for.

The 188 printable Latin-1 characters stand for themselves; for the other bytes, in order, stand the
characters from U+0100 on (GPT-2's table).
"""


def piece_bytes(piece: str) -> bytes:
    """Return the bytes of a byte-level piece. One with a character outside the alphabet (an added
    token, mostly) is plain text as a whole: so decides the library's decoder, too.
    """
    try:
        return bytes([ALPHABET[character] for character in piece])
    except KeyError:
        return piece.encode()


def sentence_bytes(piece: str) -> bytes:
    """Return the bytes of a SentencePiece piece: ``<0x0A>`` is one byte, all else is text."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes((int(piece[3:5], 16),))
        except ValueError:
            pass
    return piece.replace(SPACE, " ").encode()


@frozen(kw_only=True)
class Spelling:
    """``piece_bytes`` gives the bytes of a piece. ``drops_space``: a space that a text begins with
    was put there by the tokenizer. ``each``: of bytes that are no character, each becomes one
    U+FFFD, instead of each run that could have begun one.
    """

    piece_bytes: Callable[[str], bytes]
    drops_space: bool = False
    each: bool = False


BYTE_LEVEL: Final = Spelling(piece_bytes=piece_bytes)
_SPACES: Final = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
_SENTENCE: Final = [_SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}]
_STRIP: Final = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def spelling_of(tokenizer: tokenizers.Tokenizer) -> Spelling | None:
    """Return how the vocabulary spells bytes, as its decoder says; None if pieces are not bytes."""
    decoder: Any = tokenizer.decoder
    if decoder is None:
        return None
    description = json.loads(decoder.__getstate__())
    if description.get("type") == "ByteLevel":
        return BYTE_LEVEL
    parts = description.get("decoders")
    if parts in (_SENTENCE, [*_SENTENCE, _STRIP]):
        return Spelling(piece_bytes=sentence_bytes, drops_space=_STRIP in parts, each=True)
    return None
