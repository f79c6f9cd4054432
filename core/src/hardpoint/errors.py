"""Every error that Hardpoint raises on purpose.

Each carries its facts as attributes and says what, where, the value, and the way out. ``exit_code``
is what the command line ends with: 2 where the user can mend the call, 1 where something failed
underneath.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardpoint.records import Problem


class HardpointError(Exception):
    """Base of all errors raised on purpose by Hardpoint and its plugins."""

    exit_code: int = 1
    consequence: bool = False
    """Whether it only follows from what befell another rank. Raised in a worker, such an error is
    told to the caller if no rank reports one of its own and none has died: the first cause counts.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Rebuilt from its text and attributes: constructors here take more than the text.
        return (_rebuild, (type(self), self.args), self.__dict__)


def _rebuild(kind: type[BaseException], args: tuple[object, ...]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    return error


class ConfigError(HardpointError):
    """The configuration cannot be honoured; ``problems`` lists everything wrong with it at once."""

    exit_code = 2

    def __init__(self, message: str, *, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class InvalidRequestError(HardpointError, ValueError):
    """One request is malformed or impossible; only that request fails."""

    exit_code = 2

    def __init__(self, message: str, *, field: str = "", value: object = None) -> None:
        super().__init__(message)
        self.field = field
        self.value = value


class PluginError(HardpointError):
    """A plugin is missing, broken, refused, or two of them collide."""

    exit_code = 2


class PluginNotFoundError(PluginError):
    """No plugin of that name is installed; the message has close matches, what is installed, how to
    install.
    """


class PluginConflictError(PluginError):
    """Two distributions (or two offers) claim one name; the message names both and the key that
    decides.
    """


class IncompatiblePluginError(PluginError):
    """The plugin was built for a contract number that this core does not serve."""


class PluginLoadError(PluginError):
    """A plugin raised while it was imported or registered; what it raised is ``__cause__``."""


class NoPlatformError(PluginError):
    """No platform is available; ``table`` has every candidate's verdict."""

    def __init__(self, message: str, *, table: str) -> None:
        super().__init__(message)
        self.table = table


class UnsupportedError(HardpointError):
    """A capability that this plugin does not offer was asked for."""

    exit_code = 2

    def __init__(self, capability: str, plugin: str, *, reason: str = "", hint: str = "") -> None:
        text = f"{plugin} does not support {capability}"
        text += f": {reason}" if reason else ""
        text += f". {hint}" if hint else ""
        super().__init__(text)
        self.capability = capability
        self.plugin = plugin
        self.reason = reason


class LifecycleError(HardpointError):
    """A worker method was called out of order; the message names the step that is missing."""


class CheckpointError(HardpointError):
    """A model file is absent, truncated, corrupt, or not what it says; names the file and the
    tensor.
    """

    exit_code = 2


class UnsupportedModelError(CheckpointError):
    """The model's architecture or format is not one that is known here; the message lists those
    that are.
    """


class MemoryBudgetError(HardpointError):
    """What was asked for does not fit the memory that may be used; the message has the figures in
    bytes.
    """

    exit_code = 2


class EncodingError(HardpointError):
    """An argument or a result cannot cross to or from a worker; names the path to the offending
    value.
    """


class CallTimeoutError(HardpointError, TimeoutError):
    """A call was not answered in time. The executor still works; the late reply is dropped and
    counted.
    """


class CancelledStepError(HardpointError):
    """The work was ended from the driver (shutdown, Ctrl-C) before it was complete."""

    consequence = True


class RemoteError(HardpointError):
    """A worker method raised. The original exception is ``__cause__`` where it could be brought
    over.

    Attributes: ``rank`` of the worker, ``type_name`` of the exception (qualified),
    ``remote_traceback`` as text.
    """

    def __init__(self, message: str, *, rank: int, type_name: str, remote_traceback: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.type_name = type_name
        self.remote_traceback = remote_traceback


class ExecutorFailedError(HardpointError):
    """The executor has failed for good; the first error is ``__cause__``. Start a new one."""


class WorkerDiedError(ExecutorFailedError):
    """A worker's process or thread ended: ``rank``, ``pid``, ``exit`` (code, or negative signal),
    ``last_lines``.
    """

    def __init__(
        self, *, rank: int, pid: int, exit: int | None, last_lines: Iterable[str] = ()
    ) -> None:
        self.rank = rank
        self.pid = pid
        self.exit = exit
        self.last_lines = tuple(last_lines)
        how = (
            "ended"
            if exit is None
            else f"ended by signal {-exit}"
            if exit < 0
            else f"exited with code {exit}"
        )
        tail = "".join(f"\n  {line}" for line in self.last_lines)
        super().__init__(f"worker rank {rank} (pid {pid}) {how}{tail}")


class WorkerSilentError(ExecutorFailedError):
    """A worker's process is there and gives no sign of life: ``rank``, ``pid``, ``seconds``,
    ``stack`` (Python, as text; empty if it could not be had).
    """

    def __init__(self, *, rank: int, pid: int, seconds: float, stack: str = "") -> None:
        self.rank, self.pid, self.seconds, self.stack = rank, pid, seconds, stack
        super().__init__(
            f"worker rank {rank} (pid {pid}) was not heard for {seconds:.1f} s: it is stopped, or "
            f"something holds its interpreter{_stack_text(stack)}"
        )


class WorkerHungError(ExecutorFailedError):
    """A worker that answers has been busy with one call for longer than is allowed: ``rank``,
    ``pid``, ``call``, ``seconds``, ``stack`` as in WorkerSilentError.
    """

    def __init__(self, *, rank: int, pid: int, call: str, seconds: float, stack: str = "") -> None:
        self.rank, self.pid, self.call, self.seconds = rank, pid, call, seconds
        self.stack = stack
        super().__init__(
            f"worker rank {rank} (pid {pid}) has been busy with {call or 'a call'!r} for "
            f"{seconds:.1f} s, longer than is allowed{_stack_text(stack)}"
        )


class StartTimeoutError(ExecutorFailedError, TimeoutError):
    """No worker came further for ``seconds`` while some were not ready: ``stages`` says where each
    rank that is not ready stands.
    """

    def __init__(self, *, seconds: float, stages: Mapping[int, str]) -> None:
        self.seconds = seconds
        self.stages = dict(stages)
        told = ", ".join(f"rank {rank}: {stage}" for rank, stage in self.stages.items())
        super().__init__(
            f"the start of the workers made no progress for {seconds:.1f} s ({told}); where it is "
            "only slow, allow it more time"
        )


def _stack_text(stack: str) -> str:
    return f". Its Python stack:\n{stack.rstrip()}" if stack.strip() else ""
