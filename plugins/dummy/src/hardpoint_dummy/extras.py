"""This plugin's own records in the ``extra`` of messages, under the name ``dummy``."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen


@frozen(kw_only=True)
class RequestExtra:
    """Of a new request: ``inputs`` maps positions to bytes that take the place of their tokens
    (an image, an embedding); ``pooling`` asks for a vector instead of tokens.
    """

    inputs: tuple[tuple[int, bytes], ...] = ()
    pooling: bool = False


@frozen(kw_only=True)
class StepExtra:
    """Of a step: requests whose KV cache shall be sent or received, and encoder items likewise.

    They are reported finished ``plugins.dummy.transfer_steps`` steps later.
    """

    send: frozenset[str] = frozenset()
    receive: frozenset[str] = frozenset()
    send_items: frozenset[str] = frozenset()
    receive_items: frozenset[str] = frozenset()


NAME = "dummy"
_NO_REQUEST = RequestExtra()
_NO_STEP = StepExtra()


def request_extra(extra: Mapping[str, object]) -> RequestExtra:
    """Return this plugin's record of a request, or one that asks for nothing."""
    mine = extra.get(NAME)
    return mine if isinstance(mine, RequestExtra) else _NO_REQUEST


def step_extra(extra: Mapping[str, object]) -> StepExtra:
    """Return this plugin's record of a step, or one that asks for nothing."""
    mine = extra.get(NAME)
    return mine if isinstance(mine, StepExtra) else _NO_STEP
