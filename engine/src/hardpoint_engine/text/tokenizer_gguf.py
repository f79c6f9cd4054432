"""The tokenizer in a GGUF file's metadata (``tokenizer.ggml.*``).

Byte-level BPE (model ``gpt2``) with the ways of splitting a text that are listed in
:mod:`hardpoint_engine.text.splits`, and SentencePiece BPE (model ``llama``). The keys and their
meaning are those of the GGUF specification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hardpoint.checkpoints.gguf import GGUFFile
from hardpoint.checkpoints.tables import shown
from hardpoint.errors import CheckpointError, UnsupportedModelError

from hardpoint_engine.text.sentence_pieces import (
    LONGEST_PIECE,
    MOST_CHARACTERS,
    STYLES,
    USUAL,
    implied_merges,
    prepare,
    respelled,
)
from hardpoint_engine.text.splits import SPLITS
from hardpoint_engine.text.vocabulary import Vocabulary, checked

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Token types: control tokens are special; user-defined ones are matched whole but shown."""
NAMED: Final = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""Names of special tokens in GGUF -> in chat templates."""


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
        kind = self._text("model", "")
        if not kind:
            raise CheckpointError(
                f"{self.path} holds no tokenizer (no tokenizer.ggml.model); name a folder that has "
                "one with the key tokenizer (--tokenizer)"
            )
        kinds = {"gpt2": self._byte_level, "llama": self._sentence_pieces}
        if kind not in kinds:
            raise self._unsupported("model", kind, kinds)
        tokens = self._strings("tokens")
        tokenizer, adds_bos = kinds[kind](tokens)
        self._add_special_tokens(tokenizer, tokens)
        self._add_ends(tokenizer, tokens, adds_bos=adds_bos)
        return Vocabulary(
            tokenizer,
            chat_template=self._chat_template("tokenizer.chat_template"),
            tool_template=self._chat_template("tokenizer.chat_template.tool_use"),
            template_values=self._template_values(tokens),
        )

    def _byte_level(self, tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
        """Return the tokenizer, and whether a text begins with the BOS token by default."""
        from tokenizers.decoders import ByteLevel

        pre = self._text("pre", "default")
        if pre not in SPLITS:
            raise self._unsupported("pre", pre, SPLITS)
        split = SPLITS[pre]
        tokenizer = self._bpe(tokens, self._merges(), ignore_merges=split.whole_first)
        checked(f"{self.path}: tokenizer.ggml.pre", lambda: split.apply(tokenizer))
        tokenizer.decoder = ByteLevel()
        return tokenizer, split.adds_bos and "tokenizer.ggml.bos_token_id" in self.metadata

    def _sentence_pieces(self, tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
        """Return the tokenizer, and whether a text begins with the BOS token by default."""
        style = STYLES.get(str(self.metadata.get("general.architecture")), USUAL)
        if style.splits_at_spaces:
            tokens = respelled(tokens)
        if "tokenizer.ggml.merges" in self.metadata:
            merges = self._merges()
        else:
            merges = self._implied_merges(tokens, by_position=style.by_position)
        unknown = self._special("unknown_token_id", tokens)
        more = {} if unknown is None else {"unk_token": unknown}
        tokenizer = self._bpe(tokens, merges, fuse_unk=True, byte_fallback=True, **more)
        space = self.metadata.get("tokenizer.ggml.add_space_prefix", True) is True
        prepare(tokenizer, style, space_before=space)
        return tokenizer, "tokenizer.ggml.bos_token_id" in self.metadata

    def _bpe(
        self, tokens: Sequence[str], merges: Sequence[tuple[str, str]], **settings: Any
    ) -> Tokenizer:
        from tokenizers import Tokenizer, models

        ids = self._ids(tokens)
        return checked(
            f"{self.path}: the tables of its tokenizer contradict each other",
            lambda: Tokenizer(models.BPE(vocab=ids, merges=list(merges), **settings)),
        )

    def _implied_merges(self, tokens: Sequence[str], *, by_position: bool) -> list[tuple[str, str]]:
        lengths = [len(token) for token in tokens]
        if max(lengths, default=0) > LONGEST_PIECE or sum(lengths) > MOST_CHARACTERS:
            raise self._wrong(
                "tokens",
                f"has a piece of {max(lengths)} characters and {sum(lengths)} in all; at most "
                f"{LONGEST_PIECE} and {MOST_CHARACTERS} are accepted",
            )
        scores = self._list("scores", float)
        if len(scores) != len(tokens):
            raise self._wrong("scores", f"has {len(scores)} entries for {len(tokens)} tokens")
        return implied_merges(tokens, None if by_position else scores)

    def _unsupported(self, key: str, value: str, known: Any) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.path}: tokenizer.ggml.{key} is {shown(value)}; known here: "
            f"{', '.join(known)}. Name a folder with the model's tokenizer.json with the key "
            "tokenizer (--tokenizer)"
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
            raise self._wrong("tokens", f"holds {shown(twice)} twice")
        return ids

    def _merges(self) -> list[tuple[str, str]]:
        merges = []
        for line in self._strings("merges"):
            left, space, right = line.partition(" ")
            if not space or " " in right:
                raise self._wrong("merges", f"holds {shown(line)}, which is not two pieces")
            merges.append((left, right))
        return merges

    def _add_special_tokens(self, tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
        from tokenizers import AddedToken

        types = [NORMAL] * len(tokens)
        if "tokenizer.ggml.token_type" in self.metadata:
            types = self._list("token_type", int)
        if len(types) != len(tokens):
            raise self._wrong("token_type", f"has {len(types)} entries for {len(tokens)} tokens")
        named = {self._special(f"{name}_token_id", tokens) for name in NAMED}

        def is_special(token: str, kind: int) -> bool:
            return kind == CONTROL or (token in named and kind != USER_DEFINED)

        known = tokenizer.get_vocab()
        for special in (True, False):
            found = [
                AddedToken(token, special=special, normalized=False)
                for token, kind in zip(tokens, types, strict=True)
                if token in known
                and token
                and (is_special(token, kind) if special else kind == USER_DEFINED)
            ]
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(found)

    def _add_ends(self, tokenizer: Tokenizer, tokens: Sequence[str], *, adds_bos: bool) -> None:
        """Have every text begin and end as ``add_bos_token`` and ``add_eos_token`` ask."""
        from tokenizers.processors import TemplateProcessing

        parts, special = ["$A"], []
        for name, at, usual in (("bos", 0, adds_bos), ("eos", 2, False)):
            if self.metadata.get(f"tokenizer.ggml.add_{name}_token", usual) is True:
                token = self._special(f"{name}_token_id", tokens)
                if token is None:
                    raise self._wrong(f"add_{name}_token", f"is true, but there is no {name} token")
                parts.insert(at, f"{name}:0")
                special.append({"id": name, "ids": [tokens.index(token)], "tokens": [token]})
        if special:
            tokenizer.post_processor = checked(
                f"{self.path}: the tokens around a text",
                lambda: TemplateProcessing(single=parts, special_tokens=special),
            )

    def _special(self, key: str, tokens: Sequence[str]) -> str | None:
        index = self.metadata.get(f"tokenizer.ggml.{key}")
        if index is None:
            return None
        if type(index) is not int or not 0 <= index < len(tokens):
            raise self._wrong(key, f"is {shown(index)}, not an id below {len(tokens)}")
        return tokens[index]

    def _chat_template(self, key: str) -> str | None:
        template = self.metadata.get(key)
        return template if isinstance(template, str) else None

    def _template_values(self, tokens: Sequence[str]) -> dict[str, str]:
        found = {
            f"{short}_token": self._special(f"{long}_token_id", tokens)
            for long, short in NAMED.items()
        }
        return {name: token for name, token in found.items() if token is not None}
