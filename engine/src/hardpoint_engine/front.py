"""What every front of the engine has in common: prompts become requests of a running engine.

Runs in the driver, in the callers' threads; the engine computes on a thread of its own.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hardpoint.checkpoints import read_description
from hardpoint.checkpoints.decoder_architectures import ARCHITECTURES
from hardpoint.config import Config
from hardpoint.default_model import with_model
from hardpoint.errors import CheckpointError, InvalidRequestError, UnsupportedError
from hardpoint.pooling_params import PoolingParams
from hardpoint.sampling_params import SamplingParams

from hardpoint_engine.build import Choice, start_engine
from hardpoint_engine.completion import Generation
from hardpoint_engine.conversations import (
    ChatOptions,
    Messages,
    as_conversations,
    check_messages,
    template_values,
)
from hardpoint_engine.engine_thread import Call, EngineThread, part_id, stopped_engine
from hardpoint_engine.outputs import EmbeddingOutput
from hardpoint_engine.prompts import (
    Prompt,
    PromptTokens,
    as_tokens,
    numbered,
    spelled,
    split,
)
from hardpoint_engine.request import EngineRequest
from hardpoint_engine.structured.compiler import GrammarCompiler
from hardpoint_engine.text.chat_template import ChatTemplate
from hardpoint_engine.text.tokenizer import Tokenizer, load_tokenizer, tokenizer_source

if TYPE_CHECKING:
    from hardpoint_engine.core import EngineCore

SHUTDOWN_TIMEOUT = 10.0
NOT_SAMPLED = SamplingParams(temperature=0, max_tokens=1)
"""Of requests that end with a vector."""
CallT = TypeVar("CallT", bound=Call)


class Texts(NamedTuple):
    """What turns texts into ids: the vocabulary, and the template of conversations."""

    tokenizer: Tokenizer
    template: ChatTemplate


class Front:
    """A running engine, its thread, its tokenizer and its chat template, started and ended as one.

    ``chat`` prepares for conversations while the weights load; ``chosen`` is told what will run
    before they do. Raises what kept it from starting; nothing is left running then.
    """

    def __init__(
        self, config: Config, *, chat: bool, chosen: Callable[[Choice], None] | None = None
    ) -> None:
        config = with_model(config)
        texts = in_background(_source(config), chat=chat)
        try:
            self.core: EngineCore = start_engine(config, chosen=chosen)
        except BaseException:
            texts.add_done_callback(_close)
            raise
        self.thread = EngineThread(self.core)
        self._closed = False
        self._ids = itertools.count()
        self._texts = texts
        self._finalizer = weakref.finalize(self, _end, self.core, self.thread, texts)
        try:
            self.thread.start()
            self.tokenizer, self.template = texts.result()
            about = self.core.description
            self.grammars = GrammarCompiler(self.tokenizer, about.vocab_size, about.eos_token_ids)
        except BaseException:
            self.shutdown(SHUTDOWN_TIMEOUT)
            raise

    def require_open(self) -> None:
        """Raise LifecycleError in a forked child, ExecutorFailedError after the shutdown."""
        self.thread.require_own_process()
        if self._closed:
            raise stopped_engine()

    def tokens(self, prompts: Sequence[Prompt]) -> list[PromptTokens]:
        """Return prompts as ids. Raises InvalidRequestError, which says which is wrong."""
        vocab_size = self.core.description.vocab_size
        return [
            _about(index, len(prompts), as_tokens, prompt, self.tokenizer, vocab_size)
            for index, prompt in enumerate(prompts)
        ]

    def chat_tokens(
        self, messages: Messages | Sequence[Messages], options: ChatOptions, *, one: bool = False
    ) -> list[PromptTokens]:
        """Return conversations, or ``one``, as ids, through their chat template. Raises
        InvalidRequestError, which says which is wrong.
        """
        conversations = as_conversations(messages, options.get("system"), one=one)
        count, vocab_size = len(conversations), self.core.description.vocab_size
        source, values = options.get("chat_template"), template_values(options)
        for index, conversation in enumerate(conversations):
            _about(index, count, check_messages, conversation)
        found = []
        for index, conversation in enumerate(conversations):
            text = _about(index, count, self._render, conversation, source, values)
            found.append(_about(index, count, self._rendered_tokens, text, vocab_size))
        return found

    def _render(self, messages: Messages, source: str | None, values: Mapping[str, Any]) -> str:
        self.require_open()
        return self.template.render(messages, source=source, **values)

    def _rendered_tokens(self, text: str, vocab_size: int) -> PromptTokens:
        return as_tokens(text, self.tokenizer, vocab_size, add_special_tokens=False)

    def submit_embeddings(
        self,
        prompts: Sequence[Prompt],
        pooling: str | PoolingParams,
        generations: list[Generation],
        make_call: Callable[[list[Generation]], CallT],
    ) -> CallT:
        """Queue prompts that end with a vector, as :meth:`submit` does. Raises UnsupportedError
        where the workers do not list ``embed`` among their tasks.
        """
        params = pooling if isinstance(pooling, PoolingParams) else PoolingParams(pooling)
        if "embed" not in self.core.executor.supported_tasks():
            raise UnsupportedError("embed", f"platform {self.core.platform.name!r}")
        tokens = self.tokens(prompts)
        return self.submit(tokens, [NOT_SAMPLED] * len(tokens), generations, make_call, params)

    def submit(
        self,
        prompts: Sequence[PromptTokens],
        params: Sequence[SamplingParams],
        generations: list[Generation],
        make_call: Callable[[list[Generation]], CallT],
        pooling: PoolingParams | None = None,
    ) -> CallT:
        """Queue all or none, and add them to ``generations`` before they are queued. With
        ``pooling`` they end with vectors, without a token.
        """
        self.require_open()
        arrival = time.monotonic()
        requests = []
        for index, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
            request_id = str(next(self._ids))
            given = (request_id, prompt.ids, sampling, arrival, pooling)
            requests.append(_about(index, len(prompts), self._requests, *given))
            generations.append(
                Generation(
                    request_id=request_id,
                    prompt=prompt.text,
                    prompt_token_ids=prompt.ids,
                    sampling=sampling,
                    tokenizer=self.tokenizer,
                )
            )
        call = make_call(generations)
        self.thread.submit(call, requests)
        return call

    def _requests(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        arrival: float,
        pooling: PoolingParams | None,
    ) -> list[EngineRequest]:
        """Return a request's parts, one for each answer, checked."""
        sampling = spelled(sampling, self.tokenizer)
        sampling.check_vocabulary(self.core.description.vocab_size)
        wishes = sampling.structured_outputs
        grammar = None if wishes is None else self.grammars.compile(wishes)
        requests = [
            EngineRequest(
                req_id=part_id(request_id, index, sampling.n),
                prompt=prompt,
                sampling=own,
                arrival=arrival,
                pooling=pooling,
                grammar=grammar,
            )
            for index, own in enumerate(split(sampling))
        ]
        for request in requests:
            self.core.check_request(request)
        return requests

    def shutdown(self, timeout: float) -> None:
        """End the workers and give everything back within ``timeout`` seconds. Idempotent."""
        self._closed = True
        if self._finalizer.alive:
            _end(self.core, self.thread, self._texts, timeout)
            self._finalizer.detach()
        if (grammars := getattr(self, "grammars", None)) is not None:
            grammars.close()


def _source(config: Config) -> Path | None:
    """Return where the tokenizer comes from. Where it is missing and the model cannot be run,
    either, the model is to blame first: a tokenizer would not help.
    """
    try:
        return tokenizer_source(config)
    except CheckpointError:
        description = read_description(str(config.model.model), config.load.load_format)
        if description.architecture not in ARCHITECTURES:
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


def embedding_of(generation: Generation) -> EmbeddingOutput:
    """Return the vector of a finished request that asked for one."""
    return EmbeddingOutput(
        request_id=generation.request_id,
        prompt=generation.prompt,
        prompt_token_ids=list(generation.prompt_token_ids),
        embedding=list(generation.pooled or ()),
        metrics=generation.metrics,
    )


def in_background(source: Path | None, *, chat: bool) -> Future[Texts]:
    """Read the tokenizer on a thread of its own, while the weights load."""
    future: Future[Texts] = Future()

    def read() -> None:
        try:
            tokenizer = load_tokenizer(source)
            template = ChatTemplate(
                tokenizer.chat_template,
                tokenizer.template_values,
                tool_source=tokenizer.tool_template,
            )
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
