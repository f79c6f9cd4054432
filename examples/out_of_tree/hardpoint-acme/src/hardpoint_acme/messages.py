"""This plugin's own records in the ``extra`` of messages, under the name ``acme``."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

NAME = "acme"


@frozen(kw_only=True)
class BankRequest:
    """Of a new request: the memory bank, 0 to 7, that it would like to be computed beside."""

    bank: int = 0


@frozen(kw_only=True)
class StepReport:
    """Of a step's output: the bank of each of its requests, and how many tokens were drawn on the
    device.
    """

    banks: Mapping[str, int]
    sampled: int


def bank_of(extra: Mapping[str, object]) -> int:
    """Return the bank that a request asks for; 0 for one that asks for none."""
    mine = extra.get(NAME)
    return mine.bank if isinstance(mine, BankRequest) else 0
