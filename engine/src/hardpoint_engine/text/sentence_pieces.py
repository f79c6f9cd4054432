"""SentencePiece vocabularies out of GGUF metadata (``tokenizer.ggml.model`` = ``llama``).

The file has pieces and scores and no merges. SentencePiece joins the two neighbours whose join has
the best score; that is byte-pair encoding whose merges are all ways to halve a piece into two
others, ordered by the piece's score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from attrs import frozen

from hardpoint_engine.text.spelling import SPACE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST_PIECE: Final = 1 << 8
MOST_CHARACTERS: Final = 1 << 23
"""Longer pieces, and more characters in all, are refused: each way to halve a piece is tried."""


@frozen(kw_only=True)
class Style:
    """How an architecture's texts are prepared, of which the file does not speak.

    ``prepends``: a space is put before a text even if it begins with one. ``splits_at_spaces``:
    Gemma's way: no space is put before a text, and merges stop behind a space. ``by_position``:
    merges are in the order of the pieces, not of their scores.
    """

    prepends: bool = False
    splits_at_spaces: bool = False
    by_position: bool = False


USUAL: Final = Style()
_GEMMA: Final = Style(splits_at_spaces=True, by_position=True)
STYLES: Final[Mapping[str, Style]] = {
    "phi3": Style(prepends=True),
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
}
"""``general.architecture`` -> its style; all others have the usual one (Llama 2's, Mistral's).

As transformers has it (``Phi3``'s tokenizer.json, ``GemmaTokenizer``, ``LlamaTokenizer``).
"""


def implied_merges(tokens: Sequence[str], scores: Sequence[float] | None) -> list[tuple[str, str]]:
    """Return the merges that pieces and their scores imply, the first to be applied first.

    Without scores the order of the pieces counts. Of the ways to halve a piece, longer left parts
    come first.
    """
    ids = frozenset(tokens)
    ranked = []
    for index, token in enumerate(tokens):
        score = -index if scores is None else scores[index]
        for cut in range(1, len(token)):
            left = token[:cut]
            if left in ids and (right := token[cut:]) in ids:
                ranked.append((-score, -cut, cut - len(token), index, left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def respelled(tokens: Sequence[str]) -> list[str]:
    """Return the pieces with runs of blanks, which Gemma's files store as such, spelt as others."""
    return [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]


def prepare(tokenizer: Tokenizer, style: Style, *, space_before: bool) -> None:
    """Set how the tokenizer prepares a text and joins pieces. ``space_before``: a space is put
    before a text.
    """
    from tokenizers import decoders, normalizers, pre_tokenizers

    parts: list[object] = [
        decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()
    ]  # fmt: skip
    if style.splits_at_spaces:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif style.prepends and space_before:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            SPACE, prepend_scheme="first" if space_before else "never", split=False
        )
    if space_before and not style.splits_at_spaces:
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(parts)
