"""Fake drafts: the model's own greedy continuation, with one in three spoilt on purpose."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from hardpoint_dummy.model import FakeModel, mix

_ONE_IN = 3


def propose(
    model: FakeModel, groups: Sequence[array[int]], token: int, salt: int, count: int
) -> tuple[int, ...]:
    """Return ``count`` drafts to follow ``token``, whose position comes after the cells of
    ``groups``. The groups are not changed.
    """
    futures = [array("Q", cells) for cells in groups]
    drafts: list[int] = []
    for _ in range(count):
        before = futures[0][-1] if futures[0] else None
        cell = model.cell(before, token, salt)
        for cells in futures:
            cells.append(cell)
        state = model.state(futures)
        token = model.best(state)
        if mix(state) % _ONE_IN == 0:
            token = (token + 1) % model.vocab_size
        drafts.append(token)
    return tuple(drafts)
