"""Stages: functions that XLA compiles once for each static shape, before the first step.

A call looks the shape up; one that was not compiled is an error that names it, so nothing is ever
traced or compiled while requests run. Counts of both are kept, for tests and reports.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from attrs import define, field
from hardpoint.errors import HardpointError

Key = Hashable
"""What tells the shapes of one stage apart."""


class RetraceError(HardpointError):
    """A stage was called with a shape that was not compiled; names both."""


@define(eq=False)
class Stage:
    """One function and its programs. ``donated`` are the arguments whose buffers it uses up: they
    are deleted by the call, and using them afterwards is an error.
    """

    name: str
    function: Callable[..., Any]
    donated: tuple[int, ...] = ()
    traces: int = 0
    programs: dict[Key, jax.stages.Compiled] = field(factory=dict)

    def compile(self, key: Key, arguments: Sequence[Any]) -> None:
        """Trace and compile for ``arguments`` (arrays, or shapes with their sharding), once."""
        if key in self.programs:
            return
        jitted = jax.jit(self._traced, donate_argnums=self.donated)
        self.programs[key] = jitted.lower(*arguments).compile()

    def __call__(self, key: Key, *arguments: Any) -> Any:
        """Run the program of ``key``. Raises RetraceError if there is none."""
        program = self.programs.get(key)
        if program is None:
            known = ", ".join(map(str, self.programs)) or "nothing"
            raise RetraceError(
                f"stage {self.name!r} was not compiled for {key}, only for {known}; nothing is "
                "compiled after the warm-up. Give plugins.tpu.request_buckets or token_buckets a "
                "size for it"
            )
        return program(*arguments)

    def _traced(self, *arguments: Any) -> Any:
        self.traces += 1
        return self.function(*arguments)


class StageSet:
    """The stages of one model runner."""

    def __init__(self) -> None:
        self._stages: dict[str, Stage] = {}

    def add(self, name: str, function: Callable[..., Any], donated: tuple[int, ...] = ()) -> Stage:
        """Make a stage."""
        stage = self._stages[name] = Stage(name, function, donated)
        return stage

    def __getitem__(self, name: str) -> Stage:
        return self._stages[name]

    @property
    def traces(self) -> Mapping[str, int]:
        """Stage -> how often it was traced."""
        return {name: stage.traces for name, stage in self._stages.items()}

    @property
    def shapes(self) -> Mapping[str, int]:
        """Stage -> for how many shapes it is compiled."""
        return {name: len(stage.programs) for name, stage in self._stages.items()}

    @property
    def temporary_bytes(self) -> int:
        """Bytes of the largest work space of any program, by XLA's own account."""
        analyses = (
            program.memory_analysis()
            for stage in self._stages.values()
            for program in stage.programs.values()
        )
        return max((each.temp_size_in_bytes for each in analyses if each is not None), default=0)
