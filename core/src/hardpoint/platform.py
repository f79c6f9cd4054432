"""The Platform contract: describes a kind of hardware; touches no device.

Every method runs in the driver unless it says otherwise. Implementations live in a module that
imports no device library. What needs the device belongs to the Worker. A platform is a value passed
to constructors; two may live in one process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from attrs import fields_dict, frozen

from hardpoint.capabilities import Capability, Support
from hardpoint.errors import UnsupportedError
from hardpoint.records import ForkSafety, Limits, Placement, Problem, Verdict

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.sampling_params import SamplingParams


@frozen(kw_only=True)
class RequestView:
    """What a platform may look at before a request is queued."""

    req_id: str
    num_prompt_tokens: int
    sampling: SamplingParams


class Platform(ABC):
    """Describes one kind of hardware to the driver.

    Constructed by selection with the plugin's own settings (an instance of the record's settings
    class, or None). Subclasses set ``name``, ``worker_class``, ``model_runner_class`` and declare
    every capability.
    """

    name: ClassVar[str]
    """The configuration name, equal to the entry point's."""

    worker_class: ClassVar[str]
    """Reference ``"module:Class"`` to the :class:`hardpoint.worker.Worker`."""

    model_runner_class: ClassVar[str]
    """Reference ``"module:Class"`` to the :class:`hardpoint.model_runner.ModelRunner`."""

    capabilities: ClassVar[Mapping[Capability, Support]]
    """An answer for every :class:`Capability` known to the contract the plugin was built for."""

    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that a nursery process may import before it forks workers (none may initialise the
    device).
    """

    silent_after: ClassVar[float] = 60.0
    """Seconds for which a healthy worker may be silent because a compiler holds the interpreter."""

    exclusive: bool = False
    """Whether the runtime below allows only one engine of this platform in a process."""

    support_level: ClassVar[str] = "L0"
    """What tests have earned: L0 detection, L1 substitutes, L2 kernels compile, L3 runs a software
    stack, L4 hardware.
    """

    reference_keys: ClassVar[Mapping[str, object]] = {}
    """Keys, beside float32 everywhere, of a run whose numbers this platform's others are measured
    against: a plainer way to compute, where it has one.
    """

    unsupported_parameters: ClassVar[Mapping[str, str]] = {}
    """Sampling parameter -> why a request that sets it is refused: here it would be ignored."""

    def __init__(self, settings: object | None = None) -> None:
        self.settings = settings

    @abstractmethod
    def probe(self) -> Verdict:
        """Say whether this hardware is usable here and why (not).

        Never raises outward, never initialises a device, imports nothing heavy, ends in 200 ms.
        Called once for each registry, on a thread of its own: a longer one is warned of, and one
        of more than a second counts as unavailable.
        """

    @abstractmethod
    def limits(self, config: Config) -> Limits:
        """Return what can be executed; the scheduler obeys it. ``config`` may still have unset
        (None) values. Called any number of times, and in workers too: the same answer each time.
        """

    @abstractmethod
    def placement(self, config: Config) -> Placement:
        """Return how many workers there are and what each owns; the usual rule is one device for
        each rank of ``tensor_parallel_size * pipeline_parallel_size``. Any number of times.
        """

    def check(self, config: Config) -> Sequence[Problem]:
        """Return every problem of the complete configuration at once; a ConfigError lists them all.

        Called after the defaults are filled in, before any worker starts. Never raises.
        """
        return ()

    def remarks(self, config: Config) -> Sequence[str]:
        """Return what whoever asks for this configuration should know of how it would run: a
        sentence for each thing, such as why something is slower than it could be, with the way out.

        Called by the doctor, with a complete configuration that :meth:`check` found good. Starts
        nothing, imports nothing heavy.
        """
        return ()

    def check_request(self, request: RequestView) -> Problem | None:
        """Return why this request cannot be served, or None; called before queueing. It never edits
        the request. Here: the first of ``unsupported_parameters`` that it sets.
        """
        return refused(request.sampling, self.unsupported_parameters)

    def environment(self, config: Config, placement: Placement) -> Mapping[str, str]:
        """Return variables for every worker process, set before anything heavy is imported. Called
        by executors that start processes; one that starts none refuses what is not set already.
        """
        return {}

    def assigned_devices(self, resources: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        """Return the logical device ids in what a launcher assigned (resource name -> ids). Called
        in the worker.
        """
        return ()

    def fork_safe(self) -> ForkSafety:
        """Say whether workers may be forked of a nursery that this process starts and that imports
        ``preload``: no where a runtime that was initialised here, or in the process that this one
        came from, has left what a new program inherits. This process itself is never forked.
        """
        return ForkSafety(safe=True, reason="nothing of this platform is initialised in the driver")

    def context(self, config: Config) -> Mapping[str, object]:
        """Return extra values for every step's forward context (plain data). Called once, in the
        worker.
        """
        return {}

    def support(self, capability: Capability) -> Support:
        """Return the answer for ``capability``: NOT_YET for one that is newer than the plugin."""
        return self.capabilities.get(capability, Support.NOT_YET)

    def require(self, capability: Capability) -> None:
        """Raise UnsupportedError naming ``capability`` and this platform unless it is YES."""
        if (support := self.support(capability)) is not Support.YES:
            raise UnsupportedError(
                capability.value, f"platform {self.name!r}", reason=support.value
            )


def refused(sampling: SamplingParams, reasons: Mapping[str, str]) -> Problem | None:
    """Return a problem of the first parameter in ``reasons`` (name -> why not) that is set to what
    is not its default; an empty mapping asks for nothing.
    """
    defaults = fields_dict(type(sampling))
    for name, reason in reasons.items():
        value = getattr(sampling, name)
        if value not in (defaults[name].default, {}):
            return Problem(key=name, value=value, message=f"{reason}.")
    return None
