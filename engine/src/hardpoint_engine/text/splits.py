"""How a text is split before byte-level pieces are merged: what ``tokenizer.ggml.pre`` stands for.

Which name belongs to which way of splitting is defined by llama.cpp (``llama-vocab.cpp``); the
patterns and flags are those of the ``tokenizer.json`` that the models were published with. Where
the two differ, the latter is followed: the model was trained on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from attrs import frozen

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@frozen(kw_only=True)
class Split:
    """One way of splitting.

    Each match of ``pattern``, and what is left between two, is a piece of its own; None: GPT-2's,
    which the library has. ``digits_apart``: before that, every digit is. ``composed``: the text is
    brought to Unicode's composed form (NFC) first. ``whole_first``: a piece that is in the
    vocabulary is taken whole, whether merges lead to it or not. ``adds_bos``: a text begins with
    the BOS token where the file does not say.
    """

    pattern: str | None = None
    digits_apart: bool = False
    composed: bool = False
    whole_first: bool = False
    adds_bos: bool = False

    def apply(self, tokenizer: Tokenizer) -> None:
        """Set the tokenizer's normaliser and pre-tokenizer."""
        from tokenizers import Regex, normalizers
        from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
        from tokenizers.pre_tokenizers import Split as SplitAt

        if self.composed:
            tokenizer.normalizer = normalizers.NFC()
        parts: list[object] = [Digits(individual_digits=True)] if self.digits_apart else []
        if self.pattern is not None:
            parts.append(SplitAt(Regex(self.pattern), behavior="isolated"))
        parts.append(ByteLevel(add_prefix_space=False, use_regex=self.pattern is None))
        tokenizer.pre_tokenizer = Sequence(parts)


_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_MARKS_AND_SLASHES: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_BLANKS: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAPITALISED: Final = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_CAPITALS: Final = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"


def _any(*patterns: str) -> str:
    return "|".join(patterns)


_GPT2: Final = Split()
_DIGITS_APART: Final = Split(digits_apart=True)
_LLAMA3_PATTERN: Final = _any(_CONTRACTIONS, _WORD, r"\p{N}{1,3}", _MARKS, _BLANKS)
_LLAMA3: Final = Split(pattern=_LLAMA3_PATTERN, whole_first=True, adds_bos=True)
_QWEN2: Final = Split(pattern=_any(_CONTRACTIONS, _WORD, r"\p{N}", _MARKS, _BLANKS), composed=True)
_TEKKEN: Final = Split(
    pattern=_any(_CAPITALISED, _CAPITALS, r"\p{N}", _MARKS_AND_SLASHES, _BLANKS),
    whole_first=True,
)
_GPT4O: Final = Split(
    pattern=_any(
        f"{_CAPITALISED}{_CONTRACTIONS}?",
        f"{_CAPITALS}{_CONTRACTIONS}?",
        r"\p{N}{1,3}",
        _MARKS_AND_SLASHES,
        _BLANKS,
    )
)

SPLITS: Mapping[str, Split] = MappingProxyType(
    {
        "default": _GPT2,
        "gpt-2": _GPT2,
        "phi-2": _GPT2,
        "olmo": _GPT2,
        "smollm": _DIGITS_APART,
        "starcoder": _DIGITS_APART,
        "refact": _DIGITS_APART,
        "codeshell": _DIGITS_APART,
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
        "llama-bpe": _LLAMA3,
        "falcon3": _LLAMA3,
        "dbrx": Split(pattern=_LLAMA3_PATTERN),
        "smaug-bpe": Split(pattern=_LLAMA3_PATTERN),
        "qwen2": _QWEN2,
        "deepseek-r1-qwen": _QWEN2,
        "tekken": _TEKKEN,
        "gpt-4o": _GPT4O,
        "llama4": _GPT4O,
    }
)
"""``tokenizer.ggml.pre`` -> how a text is split. Other names are refused."""
