"""Who may start to run: the policy that a plugin can bring through ``hardpoint_scheduling``.

The scheduler asks it in the driver, for one waiting request at a time, when there is room to run
another. Order (priority, then arrival), limits and KV blocks are the scheduler's; a policy can only
hold back or turn away.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sized

from attrs import frozen
from hardpoint.sampling_params import SamplingParams

from hardpoint_engine.request import EngineOutput, Request


@frozen(kw_only=True)
class RequestInfo:
    """What a policy may know of a request. ``num_output`` and ``num_preemptions`` are 0 for one
    that never ran; ``lora_id`` is None for the base model.
    """

    req_id: str
    num_prompt: int
    num_output: int
    num_preemptions: int
    priority: int
    arrival: float
    sampling: SamplingParams
    cache_salt: str = ""
    lora_id: int | None = None

    @classmethod
    def of(cls, request: Request) -> RequestInfo:
        """Describe ``request`` as it is now."""
        source = request.source
        return cls(
            req_id=source.req_id,
            num_prompt=request.num_prompt,
            num_output=request.num_output,
            num_preemptions=request.num_preemptions,
            priority=source.priority,
            arrival=source.arrival,
            sampling=source.sampling,
            cache_salt=source.cache_salt,
            lora_id=None if source.lora is None else source.lora.id,
        )


class RunningRequests(Sized, Iterable[RequestInfo]):
    """The running requests, best first; a live view that costs nothing until it is looked at."""

    def __init__(self, running: list[Request]) -> None:
        self._running = running

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[RequestInfo]:
        return (RequestInfo.of(request) for request in self._running)


@frozen
class Admit:
    """Let it run now."""


@frozen
class Wait:
    """Ask again at the next step; those behind it are asked meanwhile."""


@frozen
class Refuse:
    """End it with an InvalidRequestError that has this reason."""

    reason: str


Decision = Admit | Wait | Refuse


class AdmissionPolicy(ABC):
    """Decides which waiting requests may start. Subclass it, offer it by ``hardpoint_scheduling``,
    name it by the key ``admission``. Constructed without arguments, one for each engine; called by
    one thread at a time, in the driver.
    """

    @abstractmethod
    def admit(self, request: RequestInfo, running: RunningRequests) -> Decision:
        """Say what to do with ``request``. A preempted request is asked about again.

        Called for one candidate at a time, best first. What it raises ends that request alone.
        """

    def observe(self, output: EngineOutput) -> None:
        """See one result of a request, as the caller of the engine will. Called after each step."""
        return


class OpenAdmission(AdmissionPolicy):
    """Lets every request run: the policy when none is configured."""

    def admit(self, request: RequestInfo, running: RunningRequests) -> Decision:
        """Let it run."""
        return Admit()
