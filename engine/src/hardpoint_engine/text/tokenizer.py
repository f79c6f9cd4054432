"""Text to token ids and back, whatever file the vocabulary comes from. Driver side only.

``load_tokenizer`` picks the reader by what lies at the path: a folder with ``tokenizer.json``
(:mod:`hardpoint_engine.text.tokenizer_json`), a GGUF file
(:mod:`hardpoint_engine.text.tokenizer_gguf`), or plain bytes for random weights
(:mod:`hardpoint_engine.text.tokenizer_bytes`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hardpoint.checkpoints.identification import expanded, unreadable
from hardpoint.errors import CheckpointError, InvalidRequestError

if TYPE_CHECKING:
    from hardpoint.config import Config

    from hardpoint_engine.text.detokenizer import Detokenizer

DUMMY = "dummy"
"""The load format of random weights, and the name of the model that has no files at all."""
NOT_READ = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
"""Files of other tokenizers, for which a folder without ``tokenizer.json`` is refused by name."""
SAVING = (
    "Save a tokenizer.json there (transformers: "
    "AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER))"
)


class Tokenizer(ABC):
    """One vocabulary. Immutable, and safe to use from several threads at once.

    ``chat_template`` is the source of the model's Jinja template, or None; ``tool_template`` that
    of the one for conversations with tools, where the model has a further one. ``template_values``
    are the strings that a template may ask for (``bos_token``, ``eos_token`` ...).
    """

    chat_template: str | None = None
    tool_template: str | None = None
    template_values: Mapping[str, str]

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """How many ids there are, added tokens included."""

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids that stand for no text: ends, roles and such."""
        return frozenset()

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that an id adds to a text; b"" for an id that does not exist."""

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the ids of ``text``.

        ``add_special_tokens`` adds what the model wants around a text (a leading BOS, say);
        rendered chat templates bring their own. Raises InvalidRequestError for text that is not
        Unicode.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; bytes that are no UTF-8 become U+FFFD."""

    @abstractmethod
    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a fresh incremental decoder whose pieces join to what :meth:`decode` gives."""


def check_text(text: str) -> None:
    """Raise InvalidRequestError if ``text`` holds half a surrogate pair (undecodable input bytes
    do).
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the prompt is not valid Unicode: {text[error.start]!r} at position {error.start}; "
            "give it as UTF-8",
            field="prompt",
            value=text[error.start],
        ) from None


def tokenizer_source(config: Config) -> Path | None:
    """Return the file or folder that ``config`` takes its vocabulary from; None for plain bytes.

    Raises CheckpointError, before anything heavy is done, if a folder has no tokenizer. What is no
    model at all is left to the reader of its description, which says so.
    """
    named, model = config.model.tokenizer, config.model.model
    try:
        return _source(named, model, dummy=config.load.load_format == DUMMY)
    except OSError as error:
        raise unreadable(named or model or DUMMY, error) from error


def _source(named: str | None, model: str | None, *, dummy: bool) -> Path | None:
    if named is not None:
        path = expanded(named)
        if not path.exists():
            raise CheckpointError(f"tokenizer = {named!r}: there is no such file or folder")
        if path.name in NOT_READ:
            raise CheckpointError(f"tokenizer = {named!r}: {path.name} is not read. {SAVING}")
        return _in_folder(path) if path.is_dir() else path
    path = expanded(model or DUMMY)
    if dummy and not path.exists():
        return None
    if path.is_dir() and (path / "config.json").exists():
        return _in_folder(path)
    return _gguf_in(path) or path


def _in_folder(path: Path) -> Path:
    if (path / "tokenizer.json").exists():
        return path
    if (file := _gguf_in(path)) is not None:
        return file
    others = [name for name in NOT_READ if (path / name).exists()]
    beside = f" ({', '.join(others)} there is not read)" if others else ""
    raise CheckpointError(
        f"{path} has no tokenizer.json, the only tokenizer file that is read in a folder{beside}. "
        f"{SAVING}, or name another folder or file with the key tokenizer (--tokenizer)"
    )


def _gguf_in(path: Path) -> Path | None:
    """Return the GGUF file that is alone in the folder ``path``."""
    files = list(path.glob("*.gguf")) if path.is_dir() else []
    return files[0] if len(files) == 1 else None


def load_tokenizer(source: Path | None) -> Tokenizer:
    """Read the vocabulary at ``source``. Raises CheckpointError naming the file and what is wrong
    with it.
    """
    if source is None:
        from hardpoint_engine.text.tokenizer_bytes import ByteTokenizer

        return ByteTokenizer()
    if source.is_dir() or source.name.endswith(".json"):
        from hardpoint_engine.text.tokenizer_json import read_json_tokenizer

        return read_json_tokenizer(source)
    from hardpoint_engine.text.tokenizer_gguf import read_gguf_tokenizer

    return read_gguf_tokenizer(source)
