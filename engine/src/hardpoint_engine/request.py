"""What a request is: as it is handed in, as the driver keeps it, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from enum import Enum
from typing import TYPE_CHECKING

from attrs import define, field, frozen
from hardpoint.adapters import LoRARequest, PromptAdapterRequest
from hardpoint.messages import Logprobs
from hardpoint.pooling_params import PoolingParams
from hardpoint.sampling_params import SamplingParams

from hardpoint_engine.scheduling.stopping import FinishReason, StopRule

if TYPE_CHECKING:
    from hardpoint_engine.structured.grammar import Grammar, GrammarError


@frozen(kw_only=True)
class EngineRequest:
    """One sequence to generate, handed to :meth:`hardpoint_engine.core.EngineCore.add_request`.

    ``prompt`` are token ids. ``arrival`` is monotonic seconds. Lower ``priority`` goes first, then
    order of arrival. Requests of different ``cache_salt`` never share cached prefixes. ``extra``
    (plugin name -> that plugin's record) reaches the workers untouched. ``grammar`` is there where
    ``sampling.structured_outputs`` is: the form of the answer, compiled or about to be.
    """

    req_id: str
    prompt: tuple[int, ...] = field(converter=tuple[int, ...])
    sampling: SamplingParams
    arrival: float
    priority: int = 0
    cache_salt: str = ""
    lora: LoRARequest | None = None
    prompt_adapter: PromptAdapterRequest | None = None
    pooling: PoolingParams | None = None
    extra: Mapping[str, object] = field(factory=dict)
    grammar: Future[Grammar] | None = None


@frozen(kw_only=True)
class RequestMetrics:
    """How one request went. Times are monotonic seconds, None for what did not happen.

    ``num_cached_tokens`` of the prompt's were in the prefix cache at the first admission.
    """

    arrival: float
    first_scheduled: float | None
    first_token: float | None
    finished: float
    num_prompt_tokens: int
    num_generation_tokens: int
    num_cached_tokens: int
    num_preemptions: int

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step."""
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds between tokens after the first; None for fewer than two."""
        if self.first_token is None or self.num_generation_tokens < 2:
            return None
        return (self.finished - self.first_token) / (self.num_generation_tokens - 1)

    @property
    def e2e_latency(self) -> float:
        """Seconds from arrival to the end."""
        return self.finished - self.arrival


@frozen(kw_only=True)
class EngineOutput:
    """What one step gave one request.

    ``new_tokens`` follow those of earlier outputs of ``req_id``; together they are its answer. The
    last output of a request, and only that one, has a ``finish_reason`` and ``metrics``:
    ``stop`` (``stop_reason`` is the stop token id or text, None for the model's own end),
    ``length``, ``abort``, or ``error`` with the ``error``. ``prompt_logprobs`` come once.
    ``ends_in_text``: it stopped because its form is complete, and its last token is text.
    ``pooled`` is the vector of a request that asked for one.
    """

    req_id: str
    new_tokens: tuple[int, ...] = ()
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: BaseException | None = None
    metrics: RequestMetrics | None = None
    ends_in_text: bool = False
    pooled: tuple[float, ...] | None = None


class Phase(Enum):
    """Where a request stands in the driver. PREPARING: its grammar is being compiled."""

    PREPARING = "preparing"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@define(eq=False, kw_only=True)
class Request:
    """The driver's account of one live request; nobody else knows what it is.

    ``source.sampling`` has a seed. ``tokens`` are prompt and output. ``num_computed`` of them are
    in the cache; until that reaches ``prefill_until`` the request is prefilling. ``blocks`` are its
    KV block ids (the same in every group), good for ``capacity`` tokens; ``num_named`` of them were
    offered to the prefix cache. ``at_workers``: the workers hold a copy. ``num_told`` of the tokens
    were in plans (kept only where workers must be told). ``grammar`` has taken in all that was
    generated; ``grammar_error`` ends the request with its next token.
    """

    source: EngineRequest
    ordinal: int
    rule: StopRule
    tokens: list[int]
    num_prompt: int
    num_computed: int = 0
    prefill_until: int = 0
    blocks: list[int] = field(factory=list)
    capacity: int = 0
    num_named: int = 0
    names: list[bytes] = field(factory=list)
    root: bytes | None = None
    weight_epoch: int = -1
    phase: Phase = Phase.WAITING
    at_workers: bool = False
    num_told: int = 0
    grammar: Grammar | None = None
    grammar_error: GrammarError | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    num_cached: int = 0
    num_preemptions: int = 0

    @classmethod
    def of(cls, source: EngineRequest, ordinal: int, rule: StopRule) -> Request:
        """Begin the account of ``source``; ``ordinal`` numbers arrivals."""
        return cls(
            source=source,
            ordinal=ordinal,
            rule=rule,
            tokens=list(source.prompt),
            num_prompt=len(source.prompt),
        )

    @property
    def req_id(self) -> str:
        """The id, unique among live requests."""
        return self.source.req_id

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: the lower."""
        return (self.source.priority, self.ordinal)

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether cached beginnings may be used: scores of prompt tokens need them computed,
        and so does a vector of them all.
        """
        source = self.source
        pools_all = source.pooling is not None and source.pooling.needs_all
        return source.sampling.prompt_logprobs is None and not pools_all

    @property
    def key_parts(self) -> tuple[str | int, ...]:
        """What, besides the tokens, the model and its weights, decides the cache's contents."""
        source = self.source
        adapters = [
            ("", "") if adapter is None else (str(adapter.id), adapter.digest)
            for adapter in (source.lora, source.prompt_adapter)
        ]
        return (source.cache_salt, *adapters[0], *adapters[1])

    def metrics_at(self, now: float) -> RequestMetrics:
        """Sum up a request that ends at ``now``."""
        return RequestMetrics(
            arrival=self.source.arrival,
            first_scheduled=self.first_scheduled,
            first_token=self.first_token,
            finished=now,
            num_prompt_tokens=self.num_prompt,
            num_generation_tokens=self.num_output,
            num_cached_tokens=self.num_cached,
            num_preemptions=self.num_preemptions,
        )
