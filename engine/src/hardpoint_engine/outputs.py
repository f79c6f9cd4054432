"""What :class:`hardpoint_engine.LLM` gives back. Names and shapes are the field's habit."""

from __future__ import annotations

from attrs import field, frozen

from hardpoint_engine.request import RequestMetrics
from hardpoint_engine.scheduling.stopping import FinishReason


@frozen(kw_only=True)
class Logprob:
    """One token's log-probability, its 1-based rank in the vocabulary, and its text. ``rank`` is
    None for a token that the request listed and that is not among the best it asked for.
    """

    logprob: float
    rank: int | None
    decoded_token: str


TokenLogprobs = dict[int, Logprob]
"""The sampled (or actual) token and those asked for, by id, at one position."""


@frozen(kw_only=True)
class CompletionOutput:
    """One of a request's ``n`` answers, as far as it has come.

    ``token_ids`` include the id that ended it. ``text`` never ends in half a character, nor in what
    may become a stop string. ``logprobs[i]`` belongs to ``token_ids[i]``. ``finish_reason`` is None
    while it grows; ``stop_reason`` is the stop token id or string that the request named.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether it will not change any more."""
        return self.finish_reason is not None


@frozen(kw_only=True)
class RequestOutput:
    """A request and its answers.

    ``prompt`` is None where ids were given. ``prompt_logprobs[i]`` scores prompt token i; the first
    has none. ``metrics`` are there once the request is finished; ``error`` is why it failed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(factory=list)
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    metrics: RequestMetrics | None = None
    error: BaseException | None = None


@frozen(kw_only=True)
class EmbeddingOutput:
    """A prompt and its vector, of the model's hidden size. ``prompt`` is None where ids were
    given.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: list[float]
    metrics: RequestMetrics | None = None
