"""The front of the engine: texts in, texts out. Runs in the driver, in the callers' threads; the
engine computes on a thread of its own.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from hardpoint.checkpoints import read_description
from hardpoint.checkpoints.gguf_description import ARCHITECTURES
from hardpoint.config import Config
from hardpoint.config.loading import load_config
from hardpoint.default_model import with_model
from hardpoint.errors import CheckpointError, InvalidRequestError
from hardpoint.sampling_params import SamplingParams

from hardpoint_engine.build import Choice, start_engine
from hardpoint_engine.completion import Generation
from hardpoint_engine.engine_thread import Call, EngineThread, part_id, stopped_engine
from hardpoint_engine.outputs import RequestOutput
from hardpoint_engine.prompts import (
    Prompt,
    PromptTokens,
    as_list,
    as_one_params,
    as_params,
    as_tokens,
    check_messages,
    is_conversation,
    numbered,
    spelled,
    split,
)
from hardpoint_engine.request import EngineRequest
from hardpoint_engine.result_stream import ResultStream
from hardpoint_engine.text.chat_template import ChatTemplate
from hardpoint_engine.text.tokenizer import Tokenizer, load_tokenizer, tokenizer_source

if TYPE_CHECKING:
    from hardpoint.checkpoints.description import ModelDescription
    from hardpoint.executor import Executor
    from hardpoint.platform import Platform

    from hardpoint_engine.core import EngineCore
    from hardpoint_engine.metrics import EngineMetrics

Messages = Sequence[Mapping[str, Any]]
SHUTDOWN_TIMEOUT = 10.0


class Texts(NamedTuple):
    """What turns texts into ids: the vocabulary, and the template of conversations."""

    tokenizer: Tokenizer
    template: ChatTemplate


class LLM:
    """A model that is ready to generate.

    Keywords are configuration keys (``platform="cpu"``, ``max_model_len=2048``, ``plugins={"cpu":
    {...}}``); ``model`` is a folder or a GGUF file, None for the installed default model. Raises
    ConfigError, CheckpointError or what else kept it from starting; nothing is left running then.
    Use it in a ``with`` block, or call :meth:`shutdown`. Several threads may call one LLM; their
    requests are computed together.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **keys: Any) -> None:
        self._start(load_config(overrides={"model": model, **keys}), chat=False)

    @classmethod
    def from_config(
        cls,
        config: Config,
        *,
        chat: bool = False,
        chosen: Callable[[Choice], None] | None = None,
    ) -> Self:
        """Start with a configuration that is loaded already. ``chat`` prepares for conversations
        while the weights load; ``chosen`` is told what will run before they do.
        """
        llm = cls.__new__(cls)
        llm._start(config, chat=chat, chosen=chosen)  # noqa: SLF001 - its own construction
        return llm

    def _start(
        self, config: Config, *, chat: bool, chosen: Callable[[Choice], None] | None = None
    ) -> None:
        config = with_model(config)
        texts = in_background(_source(config), chat=chat)
        try:
            self.core: EngineCore = start_engine(config, chosen=chosen)
        except BaseException:
            texts.add_done_callback(_close)
            raise
        self._closed = False
        self._ids = itertools.count()
        self._texts = texts
        self._thread = EngineThread(self.core)
        self._finalizer = weakref.finalize(self, _end, self.core, self._thread, texts)
        try:
            self._thread.start()
            self.tokenizer, self._template = texts.result()
        except BaseException:
            self.shutdown()
            raise

    # What it is.

    @property
    def config(self) -> Config:
        """The complete configuration, defaults filled in."""
        return self.core.config

    @property
    def platform(self) -> Platform:
        """The platform that was chosen."""
        return self.core.platform

    @property
    def executor(self) -> Executor:
        """The executor that was chosen."""
        return self.core.executor

    @property
    def description(self) -> ModelDescription:
        """What the model's files say of it."""
        return self.core.description

    @property
    def metrics(self) -> EngineMetrics:
        """The engine's counters."""
        return self.core.metrics

    # Generating.

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt, a text or token ids, as it is; return the results in their order.

        All prompts are checked before any is queued: InvalidRequestError says which is wrong and
        nothing is computed. A request that fails later has its error raised when the others are
        done.
        """
        found = as_list(prompts)
        return self._run(self._tokens(found), as_params(sampling_params, len(found)))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template.

        ``messages`` are ``{"role": "user", "content": "..."}``. Otherwise as :meth:`generate`.
        """
        one = is_conversation(messages)
        conversations: list[Any] = [messages] if one else list(messages)
        prompts = self._chat_tokens(conversations, add_generation_prompt=add_generation_prompt)
        return self._run(prompts, as_params(sampling_params, len(prompts)))

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> ResultStream:
        """Queue one prompt, as :meth:`generate` takes it, and return its growing answer."""
        (tokens,) = self._tokens([prompt])
        return self._stream(tokens, as_one_params(sampling_params))

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> ResultStream:
        """Queue one conversation, as :meth:`chat` takes it, and return its growing answer."""
        (tokens,) = self._chat_tokens([messages], add_generation_prompt=add_generation_prompt)
        return self._stream(tokens, as_one_params(sampling_params))

    def abort(self, request_id: str) -> None:
        """End a request, in whatever state; unknown and finished ids are let pass. Idempotent."""
        self._thread.require_own_process()
        self._thread.abort([request_id])

    # The rest of the engine.

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        non_block: bool = False,
        reply_rank: int | None = None,
    ) -> Any:
        """Call a method on every worker; see :meth:`hardpoint.executor.Executor.collective_rpc`."""
        return self.executor.collective_rpc(
            method,
            args=args,
            kwargs=kwargs,
            timeout=timeout,
            non_block=non_block,
            reply_rank=reply_rank,
        )

    def reset_prefix_cache(self) -> None:
        """Forget all cached prompt beginnings."""
        self.core.reset_prefix_cache()

    def shutdown(self, timeout: float = SHUTDOWN_TIMEOUT) -> None:
        """End the workers and give everything back within ``timeout`` seconds. Idempotent."""
        self._closed = True
        if self._finalizer.alive:
            _end(self.core, self._thread, self._texts, timeout)
            self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    # One way through.

    def _tokens(self, prompts: Sequence[Prompt]) -> list[PromptTokens]:
        vocab_size = self.description.vocab_size
        return [
            _about(index, len(prompts), as_tokens, prompt, self.tokenizer, vocab_size)
            for index, prompt in enumerate(prompts)
        ]

    def _chat_tokens(
        self, conversations: Sequence[Messages], *, add_generation_prompt: bool
    ) -> list[PromptTokens]:
        count, vocab_size = len(conversations), self.description.vocab_size
        for index, messages in enumerate(conversations):
            _about(index, count, check_messages, messages)
        found = []
        for index, messages in enumerate(conversations):
            text = _about(index, count, self._render, messages, add_generation_prompt)
            found.append(_about(index, count, self._rendered_tokens, text, vocab_size))
        return found

    def _render(self, messages: Messages, add_generation_prompt: bool) -> str:
        self._require_open()
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    def _rendered_tokens(self, text: str, vocab_size: int) -> PromptTokens:
        return as_tokens(text, self.tokenizer, vocab_size, add_special_tokens=False)

    def _run(
        self, prompts: Sequence[PromptTokens], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        generations: list[Generation] = []
        try:
            self._thread.wait(self._submit(prompts, params, generations, stepwise=False))
        except BaseException:
            self._thread.abort([generation.request_id for generation in generations])
            raise
        for generation in generations:
            if generation.error is not None:
                raise generation.error
        return [generation.snapshot() for generation in generations]

    def _stream(self, prompt: PromptTokens, sampling: SamplingParams) -> ResultStream:
        generations: list[Generation] = []
        try:
            call = self._submit([prompt], [sampling], generations, stepwise=True)
            return ResultStream(call, self._wait, self._drop)
        except BaseException:
            self._thread.abort([generation.request_id for generation in generations])
            raise

    def _wait(self, call: Call) -> None:
        self._thread.require_own_process()
        self._thread.wait(call)

    def _drop(self, request_id: str) -> None:
        if not self._thread.foreign:
            self._thread.abort([request_id])

    def _submit(
        self,
        prompts: Sequence[PromptTokens],
        params: Sequence[SamplingParams],
        generations: list[Generation],
        *,
        stepwise: bool,
    ) -> Call:
        """Queue all or none, and add them to ``generations`` before they are queued."""
        self._require_open()
        arrival = time.monotonic()
        requests = []
        for index, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
            request_id = str(next(self._ids))
            requests.append(
                _about(
                    index, len(prompts), self._requests, request_id, prompt.ids, sampling, arrival
                )
            )
            generations.append(
                Generation(
                    request_id=request_id,
                    prompt=prompt.text,
                    prompt_token_ids=prompt.ids,
                    sampling=sampling,
                    tokenizer=self.tokenizer,
                )
            )
        call = Call(generations, stepwise=stepwise)
        self._thread.submit(call, requests)
        return call

    def _requests(
        self, request_id: str, prompt: tuple[int, ...], sampling: SamplingParams, arrival: float
    ) -> list[EngineRequest]:
        """Return a request's parts, one for each answer, checked."""
        sampling = spelled(sampling, self.tokenizer)
        sampling.check_vocabulary(self.description.vocab_size)
        requests = [
            EngineRequest(
                req_id=part_id(request_id, index, sampling.n),
                prompt=prompt,
                sampling=own,
                arrival=arrival,
            )
            for index, own in enumerate(split(sampling))
        ]
        for request in requests:
            self.core.check_request(request)
        return requests

    def _require_open(self) -> None:
        self._thread.require_own_process()
        if self._closed:
            raise stopped_engine()


def _source(config: Config) -> Path | None:
    """Return where the tokenizer comes from. Where it is missing and the model cannot be run,
    either, the model is to blame first: a tokenizer would not help.
    """
    try:
        return tokenizer_source(config)
    except CheckpointError:
        description = read_description(str(config.model.model), config.load.load_format)
        if description.architecture not in ARCHITECTURES.values():
            start_engine(config).shutdown()  # only the workers know what else there is
        raise


def _about(index: int, count: int, check: Callable[..., Any], *args: Any) -> Any:
    """Call ``check``; an error about a prompt says which of ``count`` it is."""
    try:
        return check(*args)
    except InvalidRequestError as error:
        if count == 1:
            raise
        raise numbered(error, index, count) from error


def in_background(source: Path | None, *, chat: bool) -> Future[Texts]:
    """Read the tokenizer on a thread of its own, while the weights load."""
    future: Future[Texts] = Future()

    def read() -> None:
        try:
            tokenizer = load_tokenizer(source)
            template = ChatTemplate(tokenizer.chat_template, tokenizer.template_values)
            if chat:
                template.start()
            future.set_result(Texts(tokenizer, template))
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            future.set_exception(error)

    threading.Thread(target=read, name="hardpoint-tokenizer", daemon=True).start()
    return future


def _end(
    core: EngineCore, thread: EngineThread, texts: Future[Texts], timeout: float = SHUTDOWN_TIMEOUT
) -> None:
    """Give back what an engine has. In a forked child nothing is its own: nothing is done there."""
    if thread.foreign:
        return
    deadline = time.monotonic() + timeout
    thread.end(stopped_engine())
    try:
        core.shutdown(timeout)
    finally:
        texts.add_done_callback(_close)
        thread.join(max(0.0, deadline - time.monotonic()))


def _close(texts: Future[Texts]) -> None:
    if texts.exception() is None:
        texts.result().template.close()
