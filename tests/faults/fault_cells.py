"""The fault matrix as data: what is done to whom, when, and what must follow.

A cell is (kind, phase, target). One that cannot mean anything has a reason instead of an outcome.
"""

from __future__ import annotations

import itertools

from attrs import frozen

KINDS = ("kill", "stop", "raise", "hang", "exit", "ignore_term", "out_of_memory")
PHASES = ("start", "load", "idle", "step", "between", "shutdown")
TARGETS = ("rank 0", "last rank", "driver")

DIED, SILENT, HUNG, SLOW_START = (
    "WorkerDiedError", "WorkerSilentError", "WorkerHungError", "StartTimeoutError",
)  # fmt: skip
RAISED = "RemoteError"
"""Of the call alone, whose ranks all acknowledge; the group goes on."""
LOGGED = "a warning"
"""The shutdown ends in time and names the worker in the log."""
NOTHING = "nothing"
"""It harms nobody, as it should."""
GONE = "no process"
"""The driver is gone, and with it everything that it started."""
OWN = "its own error"
"""The driver's own exception reaches its caller; the group goes on."""

SILENT_AFTER = 0.8
HANG_AFTER = 0.6
START_TIMEOUT = 4.0
BEAT = 0.05


@frozen(kw_only=True)
class Cell:
    """One fault. ``outcome`` is what must follow, or ``reason`` why the cell means nothing."""

    kind: str
    phase: str
    target: str
    outcome: str = ""
    reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.phase}-{self.target}".replace(" ", "_")

    @property
    def bound(self) -> float:
        """Seconds from the fault to its outcome on an idle machine; tests allow SLACK more."""
        waits = {SILENT: SILENT_AFTER + 0.5, HUNG: HANG_AFTER + 0.5, SLOW_START: START_TIMEOUT}
        return waits.get(self.outcome, 1.0) + 3 * BEAT


_WORKER = {
    "kill": dict.fromkeys(PHASES[:5], DIED) | {"shutdown": LOGGED},
    "exit": dict.fromkeys(PHASES[:5], DIED) | {"shutdown": LOGGED},
    "stop": dict.fromkeys(PHASES[:5], SILENT) | {"shutdown": LOGGED},
    "raise": {
        "start": RAISED,
        "load": RAISED,
        "idle": SILENT,  # what runs then is the thread that beats
        "step": RAISED,
        "between": RAISED,
        "shutdown": LOGGED,
    },
    "hang": {
        "start": SLOW_START,
        "load": HUNG,
        "idle": SILENT,
        "step": HUNG,
        "between": HUNG,
        "shutdown": LOGGED,
    },
    "ignore_term": {
        "start": SLOW_START,
        "load": HUNG,
        "idle": NOTHING,  # the shutdown that follows needs no SIGTERM
        "step": HUNG,
        "between": HUNG,
        "shutdown": LOGGED,
    },
}
_WORKER["out_of_memory"] = _WORKER["raise"]

_DRIVER = {
    "kill": dict.fromkeys(PHASES, GONE),
    "exit": dict.fromkeys(PHASES, GONE),
    "stop": dict.fromkeys(PHASES, NOTHING),
    "raise": {
        "start": OWN,
        "load": OWN,
        "idle": "it is raised in the user's own code, of which this executor sees nothing; that "
        "the interpreter then ends is the row `exit`",
        "step": OWN,
        "between": OWN,
        "shutdown": OWN,
    },
    "hang": dict.fromkeys(
        PHASES,
        "a driver that hangs asks for nothing: to its workers it is idle, however long; a deadline "
        "for it would be its user's",
    ),
    "ignore_term": dict.fromkeys(
        PHASES,
        "whether the driver heeds SIGTERM is its user's affair; nothing here sends it one, and its "
        "end by SIGKILL is the row `kill`",
    ),
}
_DRIVER["out_of_memory"] = _DRIVER["raise"]

_OUTCOMES = {DIED, SILENT, HUNG, SLOW_START, RAISED, LOGGED, NOTHING, GONE, OWN}


def _cell(kind: str, phase: str, target: str) -> Cell:
    found = (_DRIVER if target == "driver" else _WORKER)[kind][phase]
    field = "outcome" if found in _OUTCOMES else "reason"
    return Cell(kind=kind, phase=phase, target=target, **{field: found})


CELLS = [_cell(*each) for each in itertools.product(KINDS, PHASES, TARGETS)]
"""All of them."""
