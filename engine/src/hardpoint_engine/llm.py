"""The front of the engine: texts in, texts out. Runs in the driver, in the caller's thread."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
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
from hardpoint.errors import CheckpointError, HardpointError, InvalidRequestError
from hardpoint.sampling_params import SamplingParams

from hardpoint_engine.build import Choice, start_engine
from hardpoint_engine.completion import Generation
from hardpoint_engine.outputs import RequestOutput
from hardpoint_engine.prompts import (
    Prompt,
    PromptTokens,
    as_list,
    as_params,
    as_tokens,
    check_messages,
    is_conversation,
    numbered,
    split,
)
from hardpoint_engine.request import EngineOutput, EngineRequest
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
        self._stepping = threading.Lock()
        self._state = threading.RLock()
        self._stepped = threading.Condition(self._state)
        self._num_steps = 0
        self._ids = itertools.count()
        self._routes: dict[str, tuple[Generation, int]] = {}
        self._dropped: deque[str] = deque()
        self._texts = texts
        try:
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
        (tokens,) = self._tokens([list(prompt) if not isinstance(prompt, str) else prompt])
        return self._stream(tokens, sampling_params or SamplingParams())

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> ResultStream:
        """Queue one conversation, as :meth:`chat` takes it, and return its growing answer."""
        (tokens,) = self._chat_tokens([messages], add_generation_prompt=add_generation_prompt)
        return self._stream(tokens, sampling_params or SamplingParams())

    def abort(self, request_id: str) -> None:
        """End a request, in whatever state; unknown and finished ids are let pass. Idempotent."""
        with self._state:
            self._abort(request_id)

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
        if self._closed:
            return
        self._closed = True
        try:
            self.core.shutdown(timeout)
        finally:
            self._texts.add_done_callback(_close)
            self._fail_all(HardpointError("the engine was shut down"))

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
        generations = self._submit(prompts, params)
        try:
            while not all(generation.finished for generation in generations):
                self._step()
        except BaseException:
            self._dropped.extend(generation.request_id for generation in generations)
            raise
        for generation in generations:
            if generation.error is not None:
                raise generation.error
        return [generation.snapshot() for generation in generations]

    def _stream(self, prompt: PromptTokens, sampling: SamplingParams) -> ResultStream:
        (generation,) = self._submit([prompt], [sampling])
        return ResultStream(generation, self._step, self._dropped.append, self._state)

    def _submit(
        self, prompts: Sequence[PromptTokens], params: Sequence[SamplingParams]
    ) -> list[Generation]:
        """Queue all or none."""
        self._require_open()
        arrival = time.monotonic()
        generations: list[Generation] = []
        try:
            for index, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
                generations.append(self._new_generation(prompt, sampling))
                _about(index, len(prompts), self._add, generations[-1], sampling, arrival)
        except BaseException:
            for generation in generations:
                self.abort(generation.request_id)
            raise
        return generations

    def _new_generation(self, prompt: PromptTokens, sampling: SamplingParams) -> Generation:
        return Generation(
            request_id=str(next(self._ids)),
            prompt=prompt.text,
            prompt_token_ids=prompt.ids,
            sampling=sampling,
            tokenizer=self.tokenizer,
        )

    def _add(self, generation: Generation, sampling: SamplingParams, arrival: float) -> None:
        sampling.check_vocabulary(self.description.vocab_size)
        for index, own in enumerate(split(sampling)):
            req_id = part_id(generation.request_id, index, sampling.n)
            request = EngineRequest(
                req_id=req_id, prompt=generation.prompt_token_ids, sampling=own, arrival=arrival
            )
            with self._state:  # no output before its route
                self.core.add_request(request)
                self._routes[req_id] = (generation, index)

    def _step(self) -> None:
        """Compute one step for everybody and hand its outputs out; or, if another thread is at it,
        wait until it has.
        """
        with self._state:
            self._require_open()
            seen = self._num_steps
        if not self._stepping.acquire(blocking=False):
            with self._stepped:
                self._stepped.wait_for(lambda: self._num_steps != seen)
            return
        try:
            self._step_alone()
        finally:
            self._stepping.release()
            with self._stepped:
                self._num_steps += 1
                self._stepped.notify_all()

    def _step_alone(self) -> None:
        while self._dropped:
            self.abort(self._dropped.popleft())
        if not self._routes:
            return
        try:
            outputs = self.core.step()
        except Exception as error:
            if not self.core.alive:
                self._fail_all(error)
            raise
        with self._state:
            for output in outputs:
                self._deliver(output)
            if not outputs and not self.core.has_unfinished():
                self._fail_all(HardpointError("the engine lost the request without a word"))

    def _deliver(self, output: EngineOutput) -> None:
        route = self._routes.get(output.req_id)
        if route is None:
            return
        generation, index = route
        if output.finish_reason is not None:
            del self._routes[output.req_id]
        try:
            stopped = generation.add(index, output)
        except Exception as error:  # noqa: BLE001 - it ends this request; its neighbours go on
            generation.fail(error)
            self._abort(generation.request_id)
            return
        if stopped:  # the engine's last word comes with the next step
            self.core.abort(output.req_id, "stop", generation.completions[index].stop_reason)

    def _abort(self, request_id: str) -> None:
        for req_id, (generation, _) in list(self._routes.items()):
            if generation.request_id == request_id:
                del self._routes[req_id]
                self.core.abort(req_id)
                generation.end("abort")

    def _fail_all(self, error: BaseException) -> None:
        with self._state:
            for generation, _ in self._routes.values():
                generation.fail(error)
            self._routes.clear()

    def _require_open(self) -> None:
        if self._closed:
            raise HardpointError("the engine was shut down; start a new one")


def part_id(request_id: str, index: int, count: int) -> str:
    """Return the engine's id of answer ``index`` of a request with ``count`` answers."""
    return request_id if count == 1 else f"{request_id}-{index}"


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


def _close(texts: Future[Texts]) -> None:
    if texts.exception() is None:
        texts.result().template.close()
