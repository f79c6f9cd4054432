"""A tokenizer of the `tokenizers` library, wrapped: what JSON files and GGUF metadata become."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from hardpoint.errors import CheckpointError

from hardpoint_engine.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from hardpoint_engine.text.spelling import sentence_bytes, spelling_of
from hardpoint_engine.text.tokenizer import Tokenizer, check_text

if TYPE_CHECKING:
    from pathlib import Path

    import tokenizers

Built = TypeVar("Built")


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
    """``tokenizer`` with the text around it: the chat templates and the values it may ask for."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        tool_template: str | None = None,
        template_values: Mapping[str, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.chat_template = chat_template
        self.tool_template = tool_template
        self.template_values = dict(template_values or {})
        self._special = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._spelling = spelling_of(tokenizer)
        self._bytes: dict[int, bytes] = {}

    def save(self, path: Path) -> None:
        """Write it as a ``tokenizer.json``."""
        self._tokenizer.save(str(path))

    @property
    def vocab_size(self) -> int:
        """How many ids there are, added tokens included."""
        return self._size

    @property
    def special_ids(self) -> frozenset[int]:
        """The added tokens that are special."""
        return self._special

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
        if self._spelling is not None:
            detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
            return "".join(map(detokenizer.add, ids)) + detokenizer.finish()
        return self._decode(ids, skip_special_tokens)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return checked(
            "the model's tokenizer cannot join these tokens",
            lambda: str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)),
        )

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a fresh incremental decoder."""
        hidden = self._special if skip_special_tokens else frozenset[int]()
        spelling = self._spelling
        if spelling is None:
            return WindowDetokenizer(lambda ids: self._decode(ids, skip_special_tokens), hidden)
        return ByteDetokenizer(
            lambda id_: b"" if id_ in hidden else self.token_bytes(id_),
            drops_space=spelling.drops_space,
            each=spelling.each,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one id; b"" for an id that the vocabulary does not have.

        Exact where pieces spell bytes; of other vocabularies it is what a piece is in the middle of
        a text.
        """
        known = self._bytes.get(token_id)
        if known is None:
            piece = self._tokenizer.id_to_token(token_id)
            spell = sentence_bytes if self._spelling is None else self._spelling.piece_bytes
            known = self._bytes[token_id] = b"" if piece is None else spell(piece)
        return known
