"""The LogitsProcessor contract: what a plugin, or a caller, does to the logits before a choice.

Offered by the hook ``hardpoint_logits_processors``, or named by the key ``logits_processors``. One
is constructed in each worker that samples, and used there on one thread. Every tensor shard samples
by itself: all must do the same. A module with a processor need not import the device library: the
logits bring their own methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from attrs import frozen

from hardpoint.errors import HardpointError
from hardpoint.sampling_params import SamplingParams

if TYPE_CHECKING:
    from hardpoint.config import Config


class LogitsProcessorError(HardpointError):
    """A logits processor raised, or did what it must not; names it.

    What to do: read ``__cause__``; mend the processor that the message names, or leave it out of
    ``logits_processors``.
    """


@frozen(kw_only=True, eq=False)
class AddedRequest:
    """A request that came: it owns ``slot`` until that is in ``removed``. It never moves."""

    slot: int
    req_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams


@frozen(kw_only=True, eq=False)
class RequestChanges:
    """What happened since the last step: first the slots in ``removed`` became free, then those of
    ``added`` were taken. Slots count from 0, the lowest free one is taken first.
    """

    removed: tuple[int, ...] = ()
    added: tuple[AddedRequest, ...] = ()


class SampledRows(Protocol):
    """The rows of one matrix of logits: which requests they belong to, in any order."""

    @property
    def slots(self) -> Sequence[int]:
        """The slot of each row's request."""

    @property
    def req_ids(self) -> Sequence[str]:
        """The id of each row's request."""

    def sampling(self, row: int) -> SamplingParams:
        """Return the parameters of a row's request."""

    def output(self, row: int) -> Sequence[int]:
        """Return the ids generated so far for a row's request."""

    def column(self, name: str) -> Any:
        """Return the values [rows, ...] of a batch column, as a host array."""


class LogitsProcessor(ABC):
    """Changes logits, each row for its own request alone."""

    argmax_invariant: ClassVar[bool] = False
    """Whether the best token of a row stays the best. Such a processor is applied to rows that are
    drawn only, after temperature and min-p and before top-k and top-p; any other to all rows, after
    forbidden tokens and bias and before penalties.
    """

    def __init__(self, config: Config) -> None:
        """Called once, in the worker, when the KV cache is there."""
        self.config = config

    @classmethod
    def check(cls, sampling: SamplingParams) -> None:
        """Raise InvalidRequestError for ``extra_args`` that cannot be served. Called in the driver,
        for each request that has any, before it is queued.
        """
        return

    def update(self, changes: RequestChanges) -> None:
        """Bring what is kept for each slot up to the requests. Called before :meth:`apply`, in any
        step before which requests came or went.
        """
        return

    @abstractmethod
    def apply(self, logits: Any, rows: SampledRows) -> None:
        """Change ``logits`` [rows, V], float32, of the platform's own kind, in place."""
