"""What must be true of a request before it may wait, so that a malformed one fails alone.

Nothing is queued, and no worker hears of it, until everything here has passed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NoReturn

from attrs import evolve, frozen
from hardpoint.capabilities import Capability
from hardpoint.errors import InvalidRequestError, UnsupportedError
from hardpoint.logits_processor import LogitsProcessor
from hardpoint.platform import Platform, RequestView

from hardpoint_engine.request import EngineRequest

_logger = logging.getLogger("hardpoint.engine")


@frozen(kw_only=True)
class Intake:
    """Checks requests against the model, the cache and the platform.

    ``max_model_len`` is the longest request in tokens, answer included; ``max_logprobs`` the most
    log-probabilities of one token (-1: any number). ``processors()`` are those that take
    ``extra_args``, ``configured`` the names of those that the configuration names.
    """

    platform: Platform
    vocab_size: int
    max_model_len: int
    max_logprobs: int = -1
    processors: Callable[[], Sequence[type[LogitsProcessor]]] = tuple
    configured: tuple[str, ...] = ()

    def check(self, request: EngineRequest) -> None:
        """Raise InvalidRequestError (or UnsupportedError, naming the capability) for what cannot be
        served. Changes nothing.
        """
        if not isinstance(request.req_id, str) or not request.req_id:
            self._refuse("req_id", request.req_id, "a request needs a non-empty text as its id")
        self._check_prompt(request)
        self._check_sampling(request)
        self._check_logprobs(request)
        if request.pooling is not None:
            self._check_pooling(request)
        if request.sampling.extra_args:
            self._check_extra(request)
        self._check_adapters(request)
        view = RequestView(
            req_id=request.req_id,
            num_prompt_tokens=len(request.prompt),
            sampling=request.sampling,
        )
        if (problem := self.platform.check_request(view)) is not None:
            self._refuse(problem.key, problem.value, f"request {request.req_id}: {problem}")

    def _check_prompt(self, request: EngineRequest) -> None:
        prompt = request.prompt
        who = f"request {request.req_id}"
        if not prompt:
            self._refuse("prompt", prompt, f"{who}: the prompt is empty")
        for token in prompt:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                self._refuse(
                    "prompt",
                    token,
                    f"{who}: the prompt holds {token!r}, not a token id below {self.vocab_size}",
                )
        answer = 0 if request.pooling is not None else 1
        if len(prompt) + answer > self.max_model_len:
            rest = ", at least one of them for the answer" if answer else ""
            self._refuse(
                "prompt",
                len(prompt),
                f"{who}: the prompt has {len(prompt)} tokens and the context is "
                f"{self.max_model_len} (max_model_len){rest}: shorten the prompt",
            )

    def _check_sampling(self, request: EngineRequest) -> None:
        sampling = request.sampling
        sampling.check_vocabulary(self.vocab_size)
        if sampling.effective_temperature > sampling.temperature and not sampling.greedy:
            _logger.warning(
                "request %s: temperature %g is raised to %g, the least that is not greedy",
                request.req_id, sampling.temperature, sampling.effective_temperature,
            )  # fmt: skip
        if sampling.n != 1:
            self._refuse(
                "n", sampling.n, f"request {request.req_id} is one sequence: n must be 1 here"
            )
        if sampling.bad_words and not sampling.bad_word_ids:
            self._refuse(
                "bad_words",
                sampling.bad_words,
                f"request {request.req_id}: bad_words are texts, and the engine core has no "
                "tokenizer: give their ids as bad_word_ids",
            )
        if sampling.structured_outputs is not None:
            self.platform.require(Capability.GRAMMAR)
            if request.grammar is None:
                self._refuse(
                    "structured_outputs",
                    sampling.structured_outputs,
                    f"request {request.req_id}: the engine core has no tokenizer to compile "
                    "structured_outputs for: give the grammar",
                )

    def _check_logprobs(self, request: EngineRequest) -> None:
        sampling = request.sampling
        listed = len(set(sampling.logprob_token_ids or ()))
        for name, count in (
            ("logprobs", sampling.logprobs),
            ("prompt_logprobs", sampling.prompt_logprobs),
            ("logprob_token_ids", listed),
        ):
            asked = self.vocab_size if count == -1 else count or 0
            if 0 <= self.max_logprobs < asked:
                self._refuse(
                    name,
                    getattr(sampling, name),
                    f"request {request.req_id}: {name} asks for {asked} log-probabilities of each "
                    f"token, and max_logprobs is {self.max_logprobs}: raise it (-1: any number), "
                    "or ask for fewer",
                )
        if sampling.prompt_logprobs is not None:
            self.platform.require(Capability.PROMPT_LOGPROBS)

    def _check_pooling(self, request: EngineRequest) -> None:
        self.platform.require(Capability.POOLING)
        if self.configured:
            self._refuse(
                "logits_processors",
                self.configured,
                f"request {request.req_id}: a vector is made without logits, so that the "
                f"configured logits processors ({', '.join(self.configured)}) would have no say: "
                "leave out the key logits_processors where vectors are asked for",
            )

    def _check_extra(self, request: EngineRequest) -> None:
        processors = self.processors()
        if not processors:
            self._refuse(
                "extra_args",
                request.sampling.extra_args,
                f"request {request.req_id}: there is no logits processor to take extra_args; name "
                "one by the key logits_processors, or install a plugin that offers one",
            )
        for each in processors:
            each.check(request.sampling)

    def _check_adapters(self, request: EngineRequest) -> None:
        for adapter, capability in (
            (request.lora, Capability.LORA),
            (request.prompt_adapter, Capability.PROMPT_ADAPTERS),
        ):
            if adapter is not None:
                self.platform.require(capability)
                raise UnsupportedError(
                    f"requests with {capability.value}", "hardpoint-engine", reason="not yet"
                )

    @staticmethod
    def _refuse(name: str, value: object, message: str) -> NoReturn:
        raise InvalidRequestError(message, field=name, value=value)


class Seeds:
    """Gives a seed to requests without one: the engine's seed plus the number of such requests
    before.
    """

    def __init__(self, seed: int) -> None:
        self._next = seed

    def complete(self, request: EngineRequest) -> EngineRequest:
        """Return the request with a seed."""
        if request.sampling.seed is not None:
            return request
        seed, self._next = self._next, (self._next + 1) % 2**63
        return evolve(request, sampling=request.sampling.with_seed(seed))
