"""Fake KV and encoder-cache transfers: each is finished some steps after it was asked for."""

from __future__ import annotations

from collections.abc import Mapping

from hardpoint.messages import ECConnectorOutput, KVConnectorOutput, SchedulerOutput

from hardpoint_dummy.extras import step_extra

_KINDS = ("send", "receive", "send_items", "receive_items")


class Transfers:
    """One rank's transfers on their way."""

    def __init__(self, rank: int, steps: int) -> None:
        self._rank = rank
        self._steps = steps
        self._left: dict[tuple[str, str], int] = {}

    def advance(
        self, step: SchedulerOutput
    ) -> tuple[KVConnectorOutput | None, ECConnectorOutput | None]:
        """Take in what ``step`` asks for; return what is finished in it."""
        asked = step_extra(step.extra)
        self._left = {key: left - 1 for key, left in self._left.items()}
        for kind in _KINDS:
            for name in getattr(asked, kind):
                self._left[kind, name] = self._steps
        done = {kind: self._finished(kind) for kind in _KINDS}
        self._left = {key: left for key, left in self._left.items() if left > 0}
        return self._kv(step.step_id, done), self._ec(step.step_id, done)

    def _finished(self, kind: str) -> frozenset[str]:
        return frozenset(
            name for (each, name), left in self._left.items() if each == kind and left <= 0
        )

    def _kv(self, step_id: int, done: Mapping[str, frozenset[str]]) -> KVConnectorOutput | None:
        if not (done["send"] or done["receive"]):
            return None
        return KVConnectorOutput(
            rank=self._rank,
            step_id=step_id,
            finished_sending=done["send"],
            finished_receiving=done["receive"],
        )

    def _ec(self, step_id: int, done: Mapping[str, frozenset[str]]) -> ECConnectorOutput | None:
        if not (done["send_items"] or done["receive_items"]):
            return None
        return ECConnectorOutput(
            rank=self._rank,
            step_id=step_id,
            finished_sending=done["send_items"],
            finished_receiving=done["receive_items"],
        )
