"""Grammars by the library llguidance (of the extra ``structured``): JSON schemas, regular
expressions and Lark grammars over any vocabulary of byte strings.

Its limits on the size of a grammar and on the work for one mask hold; beyond them it reports an
error, which is that request's alone. It lets go of the interpreter's lock while it works.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Self

from attrs import frozen
from hardpoint.errors import InvalidRequestError

from hardpoint_engine.structured.grammar import Grammar, GrammarError

if TYPE_CHECKING:
    import llguidance
    from llguidance._lib import JsonCompileOptions  # the only place that names it

    from hardpoint_engine.structured.specification import Specification
    from hardpoint_engine.text.tokenizer import Tokenizer

JSON_FORM: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""One way to write a value, so that no answer goes astray in white space. A schema may say
otherwise by the keyword ``x-guidance``.
"""


@frozen
class _Pieces:
    """A vocabulary as the library reads it: the bytes of each token. The first end token is that of
    the text.
    """

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    eos_token_id: int
    tokenizer: Tokenizer
    bos_token_id: int | None = None

    def __call__(self, text: bytes) -> list[int]:
        return list(self.tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False))


class GrammarMaker:
    """Compiles grammars for one vocabulary of ``vocab_size`` ids, those without a token included.
    Construction takes about half a second for 50,000 tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        # Without an end token of its own, an id beyond the vocabulary ends an answer: none does.
        ends = sorted(eos_ids) or [vocab_size]
        size = max(vocab_size, ends[-1] + 1)
        special = set(tokenizer.special_ids) | set(ends)
        pieces = _Pieces(
            tokens=[
                f"<{token}>".encode() if token in special else tokenizer.token_bytes(token)
                for token in range(size)
            ],
            special_token_ids=sorted(special),
            eos_token_id=ends[0],
            tokenizer=tokenizer,
        )
        self.mask_bytes = -(-vocab_size // 32) * 4
        self.vocabulary = LLTokenizer(TokenizerWrapper(pieces), n_vocab=size, eos_token=ends)

    def make(self, wanted: Specification) -> MatchedGrammar:
        """Compile a grammar. Raises InvalidRequestError with the library's reason."""
        from llguidance import LLMatcher

        try:
            if wanted.kind == "json":
                text = LLMatcher.grammar_from_json_schema(wanted.text, defaults=JSON_FORM)
            elif wanted.kind == "regex":
                text = LLMatcher.grammar_from_regex(wanted.text)
            else:
                text = LLMatcher.grammar_from_lark(wanted.text)
            matcher = LLMatcher(self.vocabulary, text, log_level=0)
            problem = matcher.get_error() if matcher.is_error() else ""
        except Exception as error:  # noqa: BLE001 - of an untyped library, about one request's text
            problem = str(error)
        if problem:
            raise InvalidRequestError(
                f"structured_outputs: this {wanted.kind} cannot be made a grammar: "
                f"{' '.join(problem.split())}",
                field="structured_outputs",
                value=wanted.text,
            )
        return MatchedGrammar(matcher, self.mask_bytes)


class MatchedGrammar(Grammar):
    """A grammar that a matcher of the library follows."""

    def __init__(self, matcher: llguidance.LLMatcher, mask_bytes: int) -> None:
        self._matcher = matcher
        self._mask_bytes = mask_bytes

    def start(self) -> Self:
        """See :meth:`Grammar.start`."""
        matcher = self._matcher.deep_copy()
        matcher.reset()
        return type(self)(matcher, self._mask_bytes)

    def mask(self) -> bytes:
        """See :meth:`Grammar.mask`."""
        mask = self._matcher.compute_bitmask()
        self._check()
        return mask[: self._mask_bytes]

    def accept(self, tokens: Iterable[int]) -> None:
        """See :meth:`Grammar.accept`."""
        for token in tokens:
            self._matcher.consume_token(token)
        self._check()

    @property
    def complete(self) -> bool:
        """See :attr:`Grammar.complete`."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar of the answer: {self._matcher.get_error().strip()}")
