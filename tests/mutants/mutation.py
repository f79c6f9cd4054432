"""How a mutant is written: a class, or the text of a light module, wrong in exactly one way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TypeVar

from attrs import frozen
from hardpoint.executor import Executor
from hardpoint.model_runner import ModelRunner
from hardpoint.platform import Platform
from hardpoint.worker import Worker

SUITES = {
    Executor: "ExecutorSuite",
    ModelRunner: "ModelRunnerSuite",
    Platform: "PlatformSuite",
    Worker: "WorkerSuite",
    str: "PluginSuite",
}
"""What a mutant is a kind of -> the suite that is to notice."""

C = TypeVar("C", bound=type)


@frozen(kw_only=True)
class Mutation:
    """``wrong`` is one sentence; ``caught_by`` are the tests of the kit that must fail, each with
    its parameters or without; empty for an unbroken twin. ``suite`` is where they are.
    """

    name: str
    wrong: str
    caught_by: tuple[str, ...]
    suite: str
    of: type | str

    @property
    def module(self) -> str:
        """Its name as a module's."""
        return self.name.replace("-", "_")

    @property
    def is_twin(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.caught_by


def broken(wrong: str, *caught_by: str, suite: str | None = None) -> Callable[[C], C]:
    """Make a mutant of a class; ``suite`` where another than that of its kind notices."""

    def note(kind: C) -> C:
        kind.told = (wrong, caught_by, suite)  # type: ignore[attr-defined]
        return kind

    return note


def mutations_of(module: ModuleType) -> Iterator[Mutation]:
    """Give the mutants of a module, in their order: classes marked by :func:`broken`, and what is
    in ``PLUGINS`` (name -> wrong, text, tests).
    """
    for kind in vars(module).values():
        if isinstance(kind, type) and kind.__module__ == module.__name__ and "told" in vars(kind):
            wrong, caught_by, suite = kind.told  # type: ignore[attr-defined]
            base = next(each for each in SUITES if issubclass(kind, each))
            yield Mutation(
                name=kebab(kind.__name__), wrong=wrong, caught_by=caught_by,
                suite=suite or SUITES[base], of=kind,
            )  # fmt: skip
    for name, (wrong, text, *caught_by) in getattr(module, "PLUGINS", {}).items():
        yield Mutation(
            name=name, wrong=wrong, caught_by=tuple(caught_by), suite=SUITES[str], of=text
        )


def kebab(name: str) -> str:
    """``WrongSlot`` -> ``wrong-slot``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()
