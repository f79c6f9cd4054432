"""Every byte a token: the vocabulary of random weights, which come without a file. Ids 0-255."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint_engine.text.detokenizer import ByteDetokenizer, Detokenizer
from hardpoint_engine.text.tokenizer import Tokenizer, check_text

VOCABULARY = 256


def token_bytes(token_id: int) -> bytes:
    """Return the byte that ``token_id`` is; nothing for an id beyond the vocabulary."""
    return bytes((token_id,)) if 0 <= token_id < VOCABULARY else b""


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids. It has no special tokens and no chat template."""

    def __init__(self) -> None:
        self.template_values: dict[str, str] = {}

    @property
    def vocab_size(self) -> int:
        """256."""
        return VOCABULARY

    def token_bytes(self, token_id: int) -> bytes:
        """Return the byte that ``token_id`` is."""
        return token_bytes(token_id)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the UTF-8 bytes of ``text``."""
        check_text(text)
        return tuple(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the bytes."""
        return b"".join(map(token_bytes, ids)).decode(errors="replace")

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a decoder of bytes."""
        return ByteDetokenizer(token_bytes)
