"""What the parts of the Executor suite share."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

from hardpoint.errors import ConfigError
from hardpoint.executor import Executor

from hardpoint_conformance import in_worker
from hardpoint_conformance.suite import Suite, not_applicable
from hardpoint_conformance.watching import Gate


class Workers:
    """An executor whose workers can execute, on the dummy platform."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.count = executor.world_size
        self.ranks = list(range(self.count))


class ExecutorPart(Suite):
    """Some of the suite's tests."""

    kinds: ClassVar[tuple[str, ...]] = ("executor",)

    @cached_property
    def workers(self) -> Workers:
        """A started executor, shared by the tests that leave it as it was."""
        shared = self.subject.shared
        if not isinstance(shared, Workers) or shared.executor.failure is not None:
            self.subject.release()
            shared = self.subject.shared = Workers(self.start())
        return shared

    @property
    def group(self) -> Executor:
        """The shared executor."""
        return self.workers.executor

    def start(self, **overrides: object) -> Executor:
        """Start another one; with two workers where the executor can."""
        self.subject.oracle = "the dummy platform"
        return self.subject.ready(None, **self.keys(), **overrides)

    def keys(self) -> dict[str, object]:
        """Return the configuration by which the workers' number is set."""
        if self.subject.num_workers is None:
            self.subject.num_workers = self._most_workers()
        return {"plugins.dummy.num_workers": self.subject.num_workers}

    def call(self, function: Any, *args: Any, **how: Any) -> Any:
        """Call a function in the shared executor's workers."""
        return self.group.collective_rpc(function, args=args, **how)

    def gate(self, name: str) -> Gate:
        """Return a gate that holds workers back."""
        return Gate(self.subject.scratch(f"gate-{name}"))

    def pids(self, executor: Executor) -> list[int]:
        """Return the workers' process ids, in rank order."""
        pids: list[int] = executor.collective_rpc(in_worker.pid)
        return pids

    def require_processes(self, executor: Executor) -> list[int]:
        """Return the workers' process ids; end the test where workers are threads of this one."""
        import os

        pids = self.pids(executor)
        if os.getpid() in pids:
            not_applicable("its workers live in the driver's own process")
        return pids

    def _most_workers(self) -> int:
        wanted = self.subject.probe.num_workers
        if wanted is not None:
            return wanted
        try:
            self.subject.end(self.subject.start(None, **{"plugins.dummy.num_workers": 2}))
        except ConfigError:
            return 1
        return 2
