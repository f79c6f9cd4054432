"""The custom logits processors of one runner: found, kept up to date, applied.

A request owns one slot for life, so that a processor's state cannot get into the wrong row: what it
hears of is which slots became free and which were taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen
from hardpoint.logits_processor import LogitsProcessor, LogitsProcessorError
from hardpoint.references import checked_class, resolve_class
from torch import Tensor

from hardpoint_runtime.batch.columns import Array

_logger = logging.getLogger("hardpoint.worker")

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.platform import Platform
    from hardpoint.registry import Registry
    from hardpoint.sampling_params import SamplingParams

    from hardpoint_runtime.batch.requests import Requests, RequestState


@frozen(eq=False)
class Rows:
    """The rows of one matrix of logits; see :class:`hardpoint.logits_processor.SampledRows`."""

    requests: Requests
    states: tuple[RequestState, ...]

    @property
    def slots(self) -> tuple[int, ...]:
        """The slot of each row's request."""
        return tuple(state.slot for state in self.states)

    @property
    def req_ids(self) -> tuple[str, ...]:
        """The id of each row's request."""
        return tuple(state.req_id for state in self.states)

    def sampling(self, row: int) -> SamplingParams:
        """Return the parameters of a row's request."""
        return self.states[row].sampling

    def output(self, row: int) -> Array:
        """Return the ids generated so far for a row's request."""
        state = self.states[row]
        num_prompt = self.requests.columns["num_prompt"][state.slot]
        return self.requests.tokens(state.req_id)[num_prompt:]

    def column(self, name: str) -> Array:
        """Return the values [rows, ...] of a batch column."""
        return self.requests.columns.gather(name, self.slots)


class Processors:
    """The processors that are in use, those of plugins first, each kind in order."""

    def __init__(self, processors: Sequence[LogitsProcessor], requests: Requests) -> None:
        self._requests = requests
        self._changing = tuple(each for each in processors if not each.argmax_invariant)
        self._refining = tuple(each for each in processors if each.argmax_invariant)
        if processors:
            requests.record_changes()

    @classmethod
    def load(
        cls, config: Config, registry: Registry, platform: Platform, requests: Requests
    ) -> Processors:
        """Construct those that plugins offer, by name, then the configured ones. Raises
        UnresolvedReferenceError or WrongClassError for what is none.

        Under speculative decoding, where several tokens are judged at a time, plugins' are left out
        (configured ones are a problem of the configuration there).
        """
        offers = registry.offers("hardpoint_logits_processors", platform.name)
        if offers and config.speculative.num_speculative_tokens:
            _logger.info("speculative decoding: no logits processor of a plugin: %s", [*offers])
            offers = {}
        classes = [
            resolve_class(offers[name].reference, LogitsProcessor) for name in sorted(offers)
        ]
        classes += [
            resolve_class(wanted, LogitsProcessor)
            if isinstance(wanted, str)
            else checked_class(wanted, LogitsProcessor, "logits_processors")
            for wanted in config.sampling.logits_processors
        ]
        return cls([made(config) for made in classes], requests)

    @property
    def changing(self) -> bool:
        """Whether any of them may change the best token."""
        return bool(self._changing)

    def begin(self, req_ids: Sequence[str]) -> AppliedProcessors | None:
        """Tell every processor what happened, and return what they do to the rows ``req_ids``; None
        if there is no processor.
        """
        if not self._changing and not self._refining:
            return None
        changes = self._requests.take_changes()
        if changes is not None:
            for each in (*self._changing, *self._refining):
                _called(each, "update", each.update, changes)
        rows = Rows(self._requests, tuple(self._requests[req_id] for req_id in req_ids))
        return AppliedProcessors(rows=rows, changing=self._changing, refining=self._refining)


@frozen(kw_only=True, eq=False)
class AppliedProcessors:
    """The processors over the rows of one step: ``changing`` may change which token is the best,
    ``refining`` do not.
    """

    rows: Rows
    changing: tuple[LogitsProcessor, ...] = ()
    refining: tuple[LogitsProcessor, ...] = ()

    def change(self, logits: Tensor) -> None:
        """Apply the changing ones to all rows [n, V], in place."""
        for each in self.changing:
            _called(each, "apply", each.apply, logits, self.rows)

    def refine(self, logits: Tensor, drawn: Array) -> None:
        """Apply the refining ones to the rows ``drawn`` [m], whose logits are [m, V], in place."""
        if self.refining:
            rows = Rows(self.rows.requests, tuple(self.rows.states[row] for row in drawn.tolist()))
            for each in self.refining:
                _called(each, "apply", each.apply, logits, rows)


def _called(
    processor: LogitsProcessor, method: str, call: Callable[..., object], *args: Any
) -> None:
    kind = type(processor)
    name = f"logits processor {kind.__module__}.{kind.__qualname__}"
    try:
        returned = call(*args)
    except Exception as error:
        raise LogitsProcessorError(
            f"{name} raised in {method}: {type(error).__name__}: {error}"
        ) from error
    if returned is not None:
        raise LogitsProcessorError(
            f"{name} returned a {type(returned).__name__} from {method}; it must change in place, "
            "and return nothing"
        )
