"""Compiles grammars on a thread of its own, so that no step waits for one."""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING

from hardpoint.capabilities import Capability
from hardpoint.errors import UnsupportedError

from hardpoint_engine.structured.specification import Specification, read_specification

if TYPE_CHECKING:
    from hardpoint_engine.structured.grammar import Grammar
    from hardpoint_engine.structured.llguidance_grammar import GrammarMaker
    from hardpoint_engine.text.tokenizer import Tokenizer

KEPT = 64
"""How many compiled grammars are kept for requests of the same form."""


class GrammarCompiler:
    """Turns what requests ask for into grammars. Used by callers of the front, any thread.

    Nothing of the library is loaded, and no thread is there, before the first request asks.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._vocabulary = (tokenizer, vocab_size, tuple(eos_ids))
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._maker: GrammarMaker | None = None
        self._kept: OrderedDict[Specification, Future[Grammar]] = OrderedDict()

    def compile(self, wishes: Mapping[str, object]) -> Future[Grammar]:
        """Return the grammar to be; it is for :meth:`Grammar.start`, not for an answer itself. A
        schema or expression that is none makes it an InvalidRequestError.

        Raises InvalidRequestError for what can be seen at once, UnsupportedError where the library
        is not installed.
        """
        wanted = read_specification(wishes)
        if importlib.util.find_spec("llguidance") is None:
            raise UnsupportedError(
                Capability.GRAMMAR.value,
                "hardpoint-engine",
                reason="llguidance is not installed: pip install 'hardpoint-engine[structured]'",
            )
        with self._lock:
            known = self._kept.get(wanted)
            if known is None or (known.done() and known.exception() is not None):
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(1, thread_name_prefix="hardpoint-grammar")
                known = self._kept[wanted] = self._pool.submit(self._make, wanted)
            self._kept.move_to_end(wanted)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return known

    def _make(self, wanted: Specification) -> Grammar:
        if self._maker is None:
            from hardpoint_engine.structured.llguidance_grammar import GrammarMaker

            self._maker = GrammarMaker(*self._vocabulary)
        return self._maker.make(wanted)

    def close(self) -> None:
        """Let the thread end after what it does now. Idempotent."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
