"""A tokenizer of the `tokenizers` library, wrapped: what JSON files and GGUF metadata become."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from hardpoint.errors import CheckpointError

from hardpoint_engine.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from hardpoint_engine.text.tokenizer import Tokenizer, check_text

if TYPE_CHECKING:
    import tokenizers

Built = TypeVar("Built")


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


def checked(what: str, work: Callable[[], Built]) -> Built:
    """Return ``work()``; whatever the library raises, panics too, becomes a CheckpointError that
    begins with ``what``.
    """
    try:
        return work()
    except Exception as error:
        raise CheckpointError(f"{what}: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # its Rust side panicked
            raise
        raise CheckpointError(f"{what}: {error}") from None


class Vocabulary(Tokenizer):
    """``tokenizer`` with the text around it: the chat template and the values it may ask for."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        template_values: Mapping[str, str] | None = None,
    ) -> None:
        from tokenizers.decoders import ByteLevel

        self._tokenizer = tokenizer
        self.chat_template = chat_template
        self.template_values = dict(template_values or {})
        self._special = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._bytewise = isinstance(tokenizer.decoder, ByteLevel)
        self._bytes: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        """How many ids there are, added tokens included."""
        return self._size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the ids of ``text``; see :meth:`Tokenizer.encode`."""
        check_text(text)
        encoding = checked(
            "the model's tokenizer cannot split this text",
            lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens),
        )
        return tuple(encoding.ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; see :meth:`Tokenizer.decode`."""
        return checked(
            "the model's tokenizer cannot join these tokens",
            lambda: str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)),
        )

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a fresh incremental decoder."""
        if not self._bytewise:
            return WindowDetokenizer(
                lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens)
            )
        if not skip_special_tokens:
            return ByteDetokenizer(self.token_bytes)
        hidden = self._special
        return ByteDetokenizer(lambda id_: b"" if id_ in hidden else self.token_bytes(id_))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one id of a byte-level vocabulary; b"" for an id it does not have."""
        known = self._bytes.get(token_id)
        if known is None:
            piece = self._tokenizer.id_to_token(token_id)
            known = self._bytes[token_id] = b"" if piece is None else piece_bytes(piece)
        return known
