"""From every rank's connector reports to one: pure, used in the driver by the executor.

A transfer of a request is finished when the last expected rank has said so. Who has said what is
kept by (request, rank), so a report that arrives twice counts once, and an aborted request is
forgotten with all that is still to come of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from attrs import evolve

from hardpoint.messages import (
    ECConnectorOutput,
    Extra,
    KVConnectorOutput,
    MessageError,
    ModelRunnerOutput,
)

R = TypeVar("R", KVConnectorOutput, ECConnectorOutput)

REMEMBERED = 4096
"""How many finished or forgotten names are remembered, so that late reports of them are known."""


class ReportCounter:
    """Counts the ranks that have reported a name (a request id, an item's hash)."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._ranks: dict[str, set[int]] = {}
        self._since: dict[str, int] = {}
        self._settled: OrderedDict[str, None] = OrderedDict()

    def note(self, names: Iterable[str], rank: int, step_id: int) -> None:
        """Note that ``rank`` reports ``names``. Names that are settled already are ignored."""
        for name in names:
            if name not in self._settled:
                self._ranks.setdefault(name, set()).add(rank)
                self._since.setdefault(name, step_id)

    def expect(self, count: int) -> None:
        """Expect reports of ``count`` ranks from now on."""
        self._expected = count

    def is_settled(self, name: str) -> bool:
        """Whether reports of ``name`` are ignored."""
        return name in self._settled

    def take_complete(self) -> frozenset[str]:
        """Return the names that all expected ranks have reported, each once in its life."""
        complete = frozenset(
            name for name, ranks in self._ranks.items() if len(ranks) >= self._expected
        )
        for name in complete:
            self.settle(name)
        return complete

    def settle(self, name: str) -> None:
        """Forget a name and ignore what is still reported of it."""
        self._ranks.pop(name, None)
        self._since.pop(name, None)
        self._settled[name] = None
        while len(self._settled) > REMEMBERED:
            self._settled.popitem(last=False)

    def begin(self, name: str) -> None:
        """Let a name that was settled be reported anew: another request has it now."""
        self._settled.pop(name, None)

    def waiting(self, before_step: int | None = None) -> Mapping[str, frozenset[int]]:
        """Return name -> the ranks that have reported, of those that some rank has yet to report;
        with ``before_step`` only those first reported in an earlier step (overdue).
        """
        return {
            name: frozenset(ranks)
            for name, ranks in self._ranks.items()
            if before_step is None or self._since[name] < before_step
        }


class ReportLog:
    """Tells a rank's new reports from those that came before: a rank's steps only rise."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def fresh(self, reports: Iterable[R | None]) -> list[R]:
        """Return the reports that are there and were not seen yet."""
        chosen = []
        for report in reports:
            if report is not None and report.step_id > self._last.get(report.rank, -1):
                self._last[report.rank] = report.step_id
                chosen.append(report)
        return chosen


class KVOutputAggregator:
    """Joins the KV connector reports of one step's ranks.

    ``expected_reports`` is how many ranks must report a transfer: the connector's own number, or
    the world size. A worker may raise it by its report. Blocks that could not be loaded are joined;
    a request whose receiving failed is reported as failed together with its completion, never
    before.
    """

    def __init__(self, expected_reports: int) -> None:
        if expected_reports < 1:
            raise ValueError(f"expected_reports must be at least 1, not {expected_reports}")
        self.expected_reports = expected_reports
        self._sending = ReportCounter(expected_reports)
        self._receiving = ReportCounter(expected_reports)
        self._failed: set[str] = set()
        self._log = ReportLog()

    def join(self, reports: Iterable[KVConnectorOutput | None]) -> KVConnectorOutput | None:
        """Return what is complete in this step over all ranks, or None if no rank has anything.

        Ranks that report nothing may be None or absent. The result has rank -1.
        """
        given = self._log.fresh(reports)
        if not given:
            return None
        for report in given:
            self._take(report)
        received = self._receiving.take_complete()
        failed = frozenset(self._failed & received)
        self._failed -= failed
        return KVConnectorOutput(
            rank=-1,
            step_id=max(report.step_id for report in given),
            finished_sending=self._sending.take_complete(),
            finished_receiving=received,
            failed_receiving=failed,
            invalid_blocks=frozenset().union(*(report.invalid_blocks for report in given)),
            expected_reports=self.expected_reports,
            extra=joined_extra([(report.rank, report.extra) for report in given]),
        )

    def aggregate(
        self, outputs: Sequence[ModelRunnerOutput | None], output_rank: int
    ) -> ModelRunnerOutput:
        """Return the output rank's output with the joined report in it; index i is rank i.

        If the output rank has none, its peers' reports are not lost: they come in an output without
        requests. Raises MessageError if no rank has an output.
        """
        report = self.join(output.kv for output in outputs if output is not None)
        return evolve(_carrier(outputs, output_rank), kv=report)

    def forget(self, req_id: str) -> None:
        """Forget an aborted request and ignore what ranks still report of it."""
        self._sending.settle(req_id)
        self._receiving.settle(req_id)
        self._failed.discard(req_id)

    def begin(self, req_id: str) -> None:
        """Note that a new request has this id; needed only if ids are used again."""
        self._sending.begin(req_id)
        self._receiving.begin(req_id)

    def overdue(self, step_id: int, steps: int) -> frozenset[str]:
        """Return the requests that some rank reported ``steps`` steps ago and another still has
        not.
        """
        late = step_id - steps
        return frozenset(self._sending.waiting(late)) | frozenset(self._receiving.waiting(late))

    def _take(self, report: KVConnectorOutput) -> None:
        if report.expected_reports > self.expected_reports:
            self.expected_reports = report.expected_reports
            self._sending.expect(report.expected_reports)
            self._receiving.expect(report.expected_reports)
        self._sending.note(report.finished_sending, report.rank, report.step_id)
        self._receiving.note(report.finished_receiving, report.rank, report.step_id)
        self._failed |= {
            name for name in report.failed_receiving if not self._receiving.is_settled(name)
        }


class ECOutputAggregator:
    """Joins the encoder-cache reports of one step's ranks: their union, since an item lives on
    whichever rank reports it. A report that arrives twice counts once.
    """

    def __init__(self) -> None:
        self._log = ReportLog()
        self._forgotten = ReportCounter(1)

    def join(self, reports: Iterable[ECConnectorOutput | None]) -> ECConnectorOutput | None:
        """Return the union of the ranks' reports, or None if no rank has anything. The result has
        rank -1.
        """
        given = self._log.fresh(reports)
        if not given:
            return None
        return ECConnectorOutput(
            rank=-1,
            step_id=max(report.step_id for report in given),
            finished_sending=self._known(report.finished_sending for report in given),
            finished_receiving=self._known(report.finished_receiving for report in given),
            extra=joined_extra([(report.rank, report.extra) for report in given]),
        )

    def aggregate(
        self, outputs: Sequence[ModelRunnerOutput | None], output_rank: int
    ) -> ModelRunnerOutput:
        """Return the output rank's output with the joined report in it; index i is rank i."""
        report = self.join(output.ec for output in outputs if output is not None)
        return evolve(_carrier(outputs, output_rank), ec=report)

    def forget(self, item: str) -> None:
        """Ignore what ranks still report of an item that nobody wants any more."""
        self._forgotten.settle(item)

    def begin(self, item: str) -> None:
        """Note that an item that was forgotten is transferred anew."""
        self._forgotten.begin(item)

    def _known(self, parts: Iterable[frozenset[str]]) -> frozenset[str]:
        union = frozenset(name for part in parts for name in part)
        return frozenset(name for name in union if not self._forgotten.is_settled(name))


def joined_extra(extras: Sequence[tuple[int, Extra]]) -> Extra:
    """Return plugin name -> its ranks' records as a tuple of (rank, record), in rank order."""
    joined: dict[str, list[tuple[int, object]]] = {}
    for rank, extra in sorted(extras, key=lambda pair: pair[0]):
        for name, record in extra.items():
            joined.setdefault(name, []).append((rank, record))
    return {name: tuple(records) for name, records in joined.items()}


def _carrier(outputs: Sequence[ModelRunnerOutput | None], output_rank: int) -> ModelRunnerOutput:
    own = outputs[output_rank]
    if own is not None:
        return own
    other = next((output for output in outputs if output is not None), None)
    if other is None:
        raise MessageError("no rank has an output for this step")
    return ModelRunnerOutput(step_id=other.step_id, generation=other.generation)
