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


_LONGEST_CAUSE = 400
"""Characters of what another library says of a worker's end, in our message."""


class HardpointError(Exception):
    """Base of all errors raised on purpose by Hardpoint and its plugins.

    What to do: read the message: it names the thing, the value and the way out. Catch this class to
    catch all.
    """

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
    """The configuration cannot be honoured; ``problems`` lists everything wrong with it at once.

    What to do: mend each problem that the message lists; ``hardpoint doctor`` with the same
    settings shows who set what.
    """

    exit_code = 2

    def __init__(self, message: str, *, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class InvalidRequestError(HardpointError, ValueError):
    """One request is malformed or impossible; only that request fails.

    What to do: mend the parameter that the message names (``field``, ``value``) and send the
    request again.
    """

    exit_code = 2

    def __init__(self, message: str, *, field: str = "", value: object = None) -> None:
        super().__init__(message)
        self.field = field
        self.value = value


class PluginError(HardpointError):
    """A plugin is missing, broken, refused, or two of them collide.

    What to do: ``hardpoint plugins`` shows the state of each plugin, and why.
    """

    exit_code = 2


class PluginNotFoundError(PluginError):
    """No plugin of that name is installed; the message has close matches, what is installed, how to
    install.

    What to do: install the distribution, or correct the name.
    """


class PluginConflictError(PluginError):
    """Two distributions (or two offers) claim one name; the message names both and the key that
    decides.

    What to do: uninstall one of the two, or name the one to take in the key that the message gives.
    """


class IncompatiblePluginError(PluginError):
    """The plugin was built for a contract number that this core does not serve.

    What to do: install a version of the plugin that was built for this contract number, or a
    fitting core.
    """


class PluginLoadError(PluginError):
    """A plugin raised while it was imported or registered; what it raised is ``__cause__``.

    What to do: read ``__cause__``; it is the plugin's own error. Tell the plugin's author, or name
    the plugin in ``plugins.disable``.
    """


class NoPlatformError(PluginError):
    """No platform is available; ``table`` has every candidate's verdict.

    What to do: read the reasons in ``table``; install a platform that suits this machine, or name
    one that may be used by name only.
    """

    def __init__(self, message: str, *, table: str) -> None:
        super().__init__(message)
        self.table = table


class UnsupportedError(HardpointError):
    """A capability that this plugin does not offer was asked for.

    What to do: leave the capability out, or take a platform or version that has it; `hardpoint
    doctor NAME` lists what each has.
    """

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
    """A worker method was called out of order; the message names the step that is missing.

    What to do: call the missing step first. Under an executor this is a fault of whoever called.
    """


class CheckpointError(HardpointError):
    """A model file is absent, truncated, corrupt, or not what it says; names the file and the
    tensor.

    What to do: fetch the file again, or name another; what is read is in the page on models.
    """

    exit_code = 2


class UnsupportedModelError(CheckpointError):
    """The model's architecture or format is not one that is known here; the message lists those
    that are.

    What to do: convert the model, name another, or write the architecture as a plugin.
    """


class MemoryBudgetError(HardpointError):
    """What was asked for does not fit the memory that may be used; the message has the figures in
    bytes.

    What to do: shorten ``max_model_len``, raise ``memory_utilization``, take a smaller type, or
    spread the model over more workers.
    """

    exit_code = 2


class EncodingError(HardpointError):
    """An argument or a result cannot cross to or from a worker; names the path to the offending
    value.

    What to do: send plain data, records or arrays; a plugin declares classes of its own in its
    record's ``messages``.
    """


class CallTimeoutError(HardpointError, TimeoutError):
    """A call was not answered in time. The executor still works; the late reply is dropped and
    counted.

    What to do: call again with a longer timeout, or ask ``check_health()`` what the workers do.
    """


class CancelledStepError(HardpointError):
    """The work was ended from the driver (shutdown, Ctrl-C) before it was complete.

    What to do: nothing, if you ended it; else look for the first error, of which this is a
    consequence.
    """

    consequence = True


class RemoteError(HardpointError):
    """A worker method raised. The original exception is ``__cause__`` where it could be brought
    over.

    Attributes: ``rank`` of the worker, ``type_name`` of the exception (qualified),
    ``remote_traceback`` as text.

    What to do: read ``__cause__`` and ``remote_traceback``; the executor goes on, unless it says
    that it has failed.
    """

    def __init__(self, message: str, *, rank: int, type_name: str, remote_traceback: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.type_name = type_name
        self.remote_traceback = remote_traceback


class ExecutorFailedError(HardpointError):
    """The executor has failed for good; the first error is ``__cause__``. Start a new one.

    What to do: mend the cause and start a new engine; this one is over.
    """


class WorkerDiedError(ExecutorFailedError):
    """A worker's process or thread ended: ``rank``, ``pid``, ``exit`` (code, or negative signal),
    ``last_lines``, ``host`` (empty: the driver's own). Its ``__cause__`` is what the one who
    started it says of that, if anything; the last line of it is part of the message.

    What to do: read ``last_lines`` and ``exit``: -9 is most often the system's memory killer. Start
    a new engine.
    """

    def __init__(
        self,
        *,
        rank: int,
        pid: int,
        exit: int | None,
        last_lines: Iterable[str] = (),
        host: str = "",
        cause: BaseException | None = None,
    ) -> None:
        self.rank = rank
        self.pid = pid
        self.host = host
        self.__cause__ = cause
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
        where = f" on {host}" if host else ""
        said = str(cause or "").strip().splitlines()
        why = f": {said[-1].strip()[:_LONGEST_CAUSE]}" if said else ""
        super().__init__(f"worker rank {rank} (pid {pid}{where}) {how}{why}{tail}")


class HostLostError(ExecutorFailedError):
    """Another host that takes part ended, or cannot be reached: ``host``, ``ranks`` of its workers.

    What to do: look at that host and at what its ``hardpoint worker`` wrote. Start a new engine.
    """

    def __init__(self, *, host: str, ranks: Iterable[int], why: str) -> None:
        self.host = host
        self.ranks = tuple(ranks)
        named = ", ".join(map(str, self.ranks)) or "none"
        super().__init__(f"{host} is lost, and with it its workers (ranks {named}): {why}")


class WorkerSilentError(ExecutorFailedError):
    """A worker's process is there and gives no sign of life: ``rank``, ``pid``, ``seconds``,
    ``stack`` (Python, as text; empty if it could not be had).

    What to do: read ``stack``. Where a compiler holds the interpreter for long, the platform must
    say so in ``silent_after``.
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

    What to do: read ``stack``; raise the executor's limit if such calls are meant to take as long.
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

    What to do: look at the stage of each rank; where it is only slow, raise the executor's
    ``start_timeout``. ``key`` is that configuration key, which the message names.
    """

    def __init__(self, *, seconds: float, stages: Mapping[int, str], key: str = "") -> None:
        self.seconds = seconds
        self.stages = dict(stages)
        self.key = key
        told = ", ".join(f"rank {rank}: {stage}" for rank, stage in self.stages.items())
        super().__init__(
            f"the start of the workers made no progress for {seconds:.1f} s ({told}); where it is "
            f"only slow, {f'raise {key}' if key else 'allow it more time'}"
        )


def _stack_text(stack: str) -> str:
    return f". Its Python stack:\n{stack.rstrip()}" if stack.strip() else ""
