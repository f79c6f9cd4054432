"""What the kit runs in workers. Module level functions: they travel by reference."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardpoint.worker import Worker

    from hardpoint_conformance.probe import Probe

PATIENCE = 60.0
"""Seconds after which a held worker gives up."""


class KitError(ValueError):
    """What the kit has a worker raise."""


class BareError(ValueError):
    """One whose constructor takes what its arguments do not hold."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"code {code}")
        self.detail = detail


def whoami(worker: Worker, *args: Any, **kwargs: Any) -> tuple[int, Any, Any]:
    """Return the rank and what was given."""
    return worker.rank, args, kwargs


def pid(worker: Worker) -> int:
    """Return the process's id."""
    return os.getpid()


def environment(worker: Worker, names: Sequence[str]) -> dict[str, str | None]:
    """Return what this process has of ``names``."""
    return {name: os.environ.get(name) for name in names}


def fail_on(worker: Worker, rank: int | None, *held: object) -> int:
    """Raise on one rank."""
    if worker.rank == rank:
        raise KitError("of the kit", rank)
    return worker.rank


def raise_error(worker: Worker, kind: str) -> None:
    """Raise an error of a kind, on every rank."""
    if kind == "chained":
        try:
            raise KeyError("the root")  # noqa: TRY301 - the cause is what is asked for
        except KeyError as root:
            raise KitError(8, "y") from root
    if kind == "noted":
        noted = KitError(7, "x")
        noted.add_note("a note of the worker")
        raise noted
    raise {
        "exit": SystemExit(3), "interrupt": KeyboardInterrupt(), "bare": BareError(9, detail="lost")
    }[kind]  # fmt: skip


def echo_or_fail(worker: Worker, number: int, fail: bool) -> int:
    """Return or raise the number."""
    if fail:
        raise KitError(number)
    return number


def length_of(worker: Worker, data: bytes) -> int:
    """Return how much came."""
    return len(data)


def keep_and_change(worker: Worker, values: list[Any]) -> list[Any]:
    """Change what was given, and return it."""
    values.append(worker.rank)
    return values


def return_generator(worker: Worker) -> Any:
    """Return what cannot travel."""
    return (each for each in range(0))


def pass_gate(worker: Worker, folder: str) -> str:
    """Say that this rank is here, and wait for the file ``open``."""
    place = Path(folder)
    (place / f"entered-{worker.rank}").touch()
    end = time.monotonic() + PATIENCE
    while not (place / "open").exists():
        if time.monotonic() > end:
            raise TimeoutError("the test never opened the gate")
        time.sleep(0.002)
    return "passed"


def touch(worker: Worker, path: str) -> None:
    """Leave a file for this rank."""
    Path(f"{path}-{worker.rank}").touch()


def plugins(worker: Worker) -> list[tuple[str, str, str, str]]:
    """Return kind, name, distribution and version of each plugin in use in this process."""
    return [
        (each.kind, each.name, each.distribution, each.version)
        for each in worker.registry.resolved()
    ]


def held_bytes(worker: Worker, probe: type[Probe]) -> int | None:
    """Return what the author's probe counts here."""
    return probe.held_bytes(worker)


def loaded_modules(worker: Worker) -> list[str]:
    """Return the names of the modules of this process."""
    return sorted(sys.modules)


def leave_at_shutdown(worker: Worker, path: str) -> None:
    """Have the worker leave a line in ``path`` whenever it is shut down."""
    shut_down = worker.shutdown

    def told() -> None:
        with Path(f"{path}-{worker.rank}").open("a") as file:
            file.write("shutdown\n")
        shut_down()

    worker.shutdown = told  # type: ignore[method-assign]


def keep_plans(worker: Worker) -> None:
    """Have the model runner keep each plan as it arrives, until :func:`kept_plans`."""
    runner: Any = worker.get_model_runner()
    execute, plans = runner.execute_model, []

    def kept(plan: Any, *args: Any, **kwargs: Any) -> Any:
        plans.append(plan)
        return execute(plan, *args, **kwargs)

    runner.execute_model, runner.kept_by_the_kit = kept, plans


def kept_plans(worker: Worker) -> list[Any]:
    """Return the plans that were kept, and keep no more."""
    runner: Any = worker.get_model_runner()
    plans: list[Any] = runner.kept_by_the_kit
    del runner.execute_model, runner.kept_by_the_kit
    return plans


def append_line(worker: Worker, folder: str, number: int) -> None:
    """Write a number into this rank's file."""
    with (Path(folder) / f"lines-{worker.rank}").open("a") as file:
        file.write(f"{number}\n")


def note_shutdown(worker: Worker, path: str) -> None:
    """Have the worker note when its shutdown begins and when it is done without an error."""
    shut_down = worker.shutdown

    def told() -> None:
        file = Path(f"{path}-{worker.rank}")
        with file.open("a") as notes:
            notes.write("begun\n")
        shut_down()
        with file.open("a") as notes:
            notes.write("done\n")

    worker.shutdown = told  # type: ignore[method-assign]


def implements(worker: Worker, name: str) -> bool:
    """Whether the worker's class has a method of its own of that name."""
    from hardpoint.worker import Worker as Base

    return getattr(type(worker), name) is not getattr(Base, name)
