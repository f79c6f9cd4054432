"""A conversation that grows turn by turn, and what is left out of it when it outgrows the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hardpoint.errors import InvalidRequestError

ROOM_SHARE = 4
"""An answer gets at least this part of ``max_model_len``, if it may be that long."""


class Conversation:
    """Turns of a person and a model, ``system`` before them.

    ``tokenize`` returns a list of messages as token ids. A prompt and its answer have ``length``
    tokens at most; ``max_tokens`` is the longest answer, None: no bound.
    """

    def __init__(
        self,
        tokenize: Callable[[list[dict[str, Any]]], list[int]],
        *,
        length: int,
        max_tokens: int | None,
        system: str | None = None,
    ) -> None:
        self.system = system
        self._turns: list[tuple[str, str]] = []
        self._tokenize = tokenize
        self._length = length
        room = max(1, length // ROOM_SHARE)
        self._room = room if max_tokens is None else max(1, min(room, max_tokens))

    def __len__(self) -> int:
        """Return the number of turns."""
        return len(self._turns)

    def reset(self) -> None:
        """Forget all turns; ``system`` stays."""
        self._turns.clear()

    def messages(self, question: str) -> list[dict[str, Any]]:
        """Return everything up to ``question``, for a chat template."""
        return self._messages(self._turns, question)

    def _messages(self, turns: list[tuple[str, str]], question: str) -> list[dict[str, Any]]:
        found = [] if self.system is None else [{"role": "system", "content": self.system}]
        for asked, answered in turns:
            found.append({"role": "user", "content": asked})
            found.append({"role": "assistant", "content": answered})
        return [*found, {"role": "user", "content": question}]

    def ask(self, question: str) -> tuple[list[int], int]:
        """Return the prompt of ``question``, and how many of the oldest turns were left out for
        good, so that the answer has room. Raises InvalidRequestError if it has none even so.
        Whatever is raised, an interrupt too, nothing is left out then.
        """
        for dropped in range(len(self._turns) + 1):
            kept = self._turns[dropped:]
            ids = self._tokenize(self._messages(kept, question))
            if len(ids) + self._room <= self._length:
                self._turns = kept
                return ids, dropped
        raise InvalidRequestError(
            f"the question has {len(ids)} tokens with the system message, and an answer "
            f"needs {self._room} of the {self._length} of max_model_len: ask a shorter "
            "one, or raise --max-model-len",
            field="messages",
            value=len(ids),
        )

    def answered(self, question: str, answer: str) -> None:
        """Add a turn."""
        self._turns.append((question, answer))
