"""The tokenizer in a GGUF file's metadata (``tokenizer.ggml.*``).

Byte-level BPE (model ``gpt2``) with the ways of splitting a text that are listed in ``SPLITS``. The
keys and their meaning are those of the GGUF specification; how a name of ``tokenizer.ggml.pre``
splits is defined by llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint.checkpoints.gguf import GGUFFile
from hardpoint.errors import CheckpointError, UnsupportedModelError

from hardpoint_engine.text.vocabulary import Vocabulary, checked

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

CONTROL, USER_DEFINED = 3, 4
"""Token types: control tokens are special; user-defined ones are matched whole but shown."""


def _gpt2() -> PreTokenizer:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_apart() -> PreTokenizer:
    """Every digit on its own, then as GPT-2.

    transformers 5 splits such a GGUF file as plain GPT-2, which differs where two or more spaces or
    line ends precede a digit; the tokenizer.json that these models were published with does as
    here.
    """
    from tokenizers.pre_tokenizers import Digits, Sequence

    return Sequence([Digits(individual_digits=True), _gpt2()])


SPLITS: Mapping[str, Callable[[], PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _digits_apart,
}
"""``tokenizer.ggml.pre`` -> how a text is split before pairs are merged."""


def read_gguf_tokenizer(path: Path) -> Vocabulary:
    """Build the tokenizer of the GGUF file at ``path``.

    Raises CheckpointError for a file without one or with contradicting tables,
    UnsupportedModelError for a kind that is not known here.
    """
    with GGUFFile(path) as file:
        return _Reader(path, file.metadata).read()


class _Reader:
    """One file's metadata, and the way to a Vocabulary."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self.metadata = metadata

    def read(self) -> Vocabulary:
        from tokenizers import Tokenizer, models
        from tokenizers.decoders import ByteLevel

        kind = self._text("model", "")
        if not kind:
            raise CheckpointError(
                f"{self.path} holds no tokenizer (no tokenizer.ggml.model); name a folder that has "
                "one with the key tokenizer (--tokenizer)"
            )
        if kind != "gpt2":
            raise self._unsupported("model", kind, ["gpt2"])
        pre = self._text("pre", "default")
        if pre not in SPLITS:
            raise self._unsupported("pre", pre, SPLITS)
        tokens = self._strings("tokens")
        tokenizer = checked(
            f"{self.path}: the tables of its tokenizer contradict each other",
            lambda: Tokenizer(models.BPE(vocab=self._ids(tokens), merges=self._merges())),
        )
        tokenizer.pre_tokenizer = SPLITS[pre]()
        tokenizer.decoder = ByteLevel()
        self._add_special_tokens(tokenizer, tokens)
        self._add_beginning(tokenizer, tokens)
        return Vocabulary(
            tokenizer,
            chat_template=self._chat_template(),
            template_values=self._template_values(tokens),
        )

    def _unsupported(self, key: str, value: str, known: Any) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.path}: tokenizer.ggml.{key} is {value!r}; known here: {', '.join(known)}. Name "
            "a folder with the model's tokenizer.json with the key tokenizer (--tokenizer)"
        )

    def _text(self, key: str, default: str) -> str:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, str):
            raise self._wrong(key, f"must be text, not {type(value).__name__}")
        return value

    def _wrong(self, key: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: tokenizer.ggml.{key} {why}")

    def _list(self, key: str, kind: type) -> list[Any]:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if value is None or isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise self._wrong(key, "must be an array" if value is not None else "is missing")
        items = list(value)
        if not all(type(item) is kind for item in items):
            raise self._wrong(key, f"must hold {kind.__name__} values only")
        return items

    def _strings(self, key: str) -> list[str]:
        return self._list(key, str)

    def _ids(self, tokens: Sequence[str]) -> dict[str, int]:
        ids = {token: index for index, token in enumerate(tokens)}
        if len(ids) != len(tokens):
            twice = next(token for index, token in enumerate(tokens) if ids[token] != index)
            raise self._wrong("tokens", f"holds {twice!r} twice")
        return ids

    def _merges(self) -> list[tuple[str, str]]:
        merges = []
        for line in self._strings("merges"):
            left, space, right = line.partition(" ")
            if not space or " " in right:
                raise self._wrong("merges", f"holds {line!r}, which is not two pieces")
            merges.append((left, right))
        return merges

    def _add_special_tokens(self, tokenizer: Any, tokens: Sequence[str]) -> None:
        from tokenizers import AddedToken

        if "tokenizer.ggml.token_type" not in self.metadata:
            return
        types = self._list("token_type", int)
        if len(types) != len(tokens):
            raise self._wrong("token_type", f"has {len(types)} entries for {len(tokens)} tokens")
        for wanted, special in ((CONTROL, True), (USER_DEFINED, False)):
            found = [
                AddedToken(token, special=special, normalized=False)
                for token, kind in zip(tokens, types, strict=True)
                if kind == wanted and token
            ]
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(found)

    def _add_beginning(self, tokenizer: Any, tokens: Sequence[str]) -> None:
        """Have every text begin and end as ``add_bos_token`` and ``add_eos_token`` ask."""
        from tokenizers.processors import TemplateProcessing

        parts, special = ["$A"], []
        for name, at in (("bos", 0), ("eos", 2)):
            if self.metadata.get(f"tokenizer.ggml.add_{name}_token") is True:
                token = self._special(f"{name}_token_id", tokens)
                if token is None:
                    raise self._wrong(f"add_{name}_token", f"is true, but there is no {name} token")
                parts.insert(at, token)
                special.append((token, tokens.index(token)))
        if special:
            tokenizer.post_processor = TemplateProcessing(single=parts, special_tokens=special)

    def _special(self, key: str, tokens: Sequence[str]) -> str | None:
        index = self.metadata.get(f"tokenizer.ggml.{key}")
        if index is None:
            return None
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            raise self._wrong(key, f"is {index!r}, not an id below {len(tokens)}")
        return tokens[index]

    def _chat_template(self) -> str | None:
        template = self.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    def _template_values(self, tokens: Sequence[str]) -> dict[str, str]:
        names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
        found = {
            f"{short}_token": self._special(f"{long}_token_id", tokens)
            for long, short in names.items()
        }
        return {name: token for name, token in found.items() if token is not None}
