"""The front of the engine: texts in, texts out. Runs in the driver, in the callers' threads; the
engine computes on a thread of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from hardpoint.config import Config
from hardpoint.config.loading import load_config
from hardpoint.pooling_params import PoolingParams
from hardpoint.sampling_params import SamplingParams

from hardpoint_engine import pausing
from hardpoint_engine.build import Choice
from hardpoint_engine.completion import Generation
from hardpoint_engine.conversations import ChatOptions, Messages, check_options
from hardpoint_engine.engine_thread import Call
from hardpoint_engine.front import SHUTDOWN_TIMEOUT, Front, embedding_of
from hardpoint_engine.outputs import EmbeddingOutput, RequestOutput
from hardpoint_engine.prompts import (
    Prompt,
    PromptTokens,
    as_list,
    as_one_params,
    as_params,
)
from hardpoint_engine.result_stream import ResultStream

if TYPE_CHECKING:
    from hardpoint.checkpoints.description import ModelDescription
    from hardpoint.executor import Executor
    from hardpoint.platform import Platform

    from hardpoint_engine.core import EngineCore
    from hardpoint_engine.metrics import EngineMetrics
    from hardpoint_engine.text.tokenizer import Tokenizer


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
        self._front = Front(config, chat=chat, chosen=chosen)

    # What it is.

    @property
    def core(self) -> EngineCore:
        """The engine itself."""
        return self._front.core

    @property
    def tokenizer(self) -> Tokenizer:
        """What turns texts into ids and back."""
        return self._front.tokenizer

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
        return self._run(self._front.tokens(found), as_params(sampling_params, len(found)))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template.

        ``messages`` are ``{"role": "user", "content": "..."}``. Keywords are those of
        :class:`hardpoint_engine.conversations.ChatOptions`: ``system``, ``tools``,
        ``chat_template``, ``chat_template_kwargs``, ``add_generation_prompt``. Otherwise as
        :meth:`generate`.
        """
        check_options(options)
        prompts = self._front.chat_tokens(messages, options)
        return self._run(prompts, as_params(sampling_params, len(prompts)))

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> ResultStream:
        """Queue one prompt, as :meth:`generate` takes it, and return its growing answer."""
        (tokens,) = self._front.tokens([prompt])
        return self._stream(tokens, as_one_params(sampling_params))

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> ResultStream:
        """Queue one conversation, as :meth:`chat` takes it, and return its growing answer."""
        check_options(options)
        (tokens,) = self._front.chat_tokens(messages, options, one=True)
        return self._stream(tokens, as_one_params(sampling_params))

    def tokenize_chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> list[int]:
        """Return the token ids that :meth:`chat` would compute of one conversation."""
        check_options(options)
        (tokens,) = self._front.chat_tokens(messages, options, one=True)
        return list(tokens.ids)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str | PoolingParams = "mean",
    ) -> list[EmbeddingOutput]:
        """Return a vector for each prompt, a text or token ids, in their order: its final hidden
        states, pooled (``mean``, ``last``, ``cls``). Raises as :meth:`generate` does, and
        UnsupportedError where the workers do not list ``embed`` among their tasks.
        """
        submit = partial(self._front.submit_embeddings, as_list(prompts), pooling)
        return [embedding_of(generation) for generation in self._finished(submit)]

    def abort(self, request_id: str) -> None:
        """End a request, in whatever state; unknown and finished ids are let pass. Idempotent."""
        self._front.thread.require_own_process()
        self._front.thread.abort([request_id])

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

    def start_profile(
        self,
        prefix: str | None = None,
        *,
        delay_iterations: int = 0,
        max_iterations: int | None = None,
    ) -> None:
        """Have every worker record its steps, ``delay_iterations`` of them passed over and at most
        ``max_iterations`` recorded, for a file ``PREFIX-rank-N.json`` in ``profile_folder``.
        Ignored while they are recorded. Raises InvalidRequestError for a prefix that is no
        beginning of a file name, UnsupportedError where the platform has no profiler.
        """
        self.executor.profile(True, prefix, delay_iterations, max_iterations)

    def stop_profile(self) -> None:
        """Have every worker write its file. Not started, they warn and do nothing."""
        self.executor.stop_profile()

    def sleep(self, level: int = 1) -> None:
        """Pause; level 1 keeps the weights on the host and drops the KV cache, level 2 drops both,
        level 0 only pauses. Requests are taken in and wait for :meth:`wake_up`.
        """
        pausing.sleep(self.core, level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Wake ``weights``, ``kv_cache`` or ``scheduling`` (None: all). Scheduling resumes only
        when all memory is there and defined: after level 2, reload the weights first. Raises
        SleepStateError where scheduling is named too early.
        """
        pausing.wake_up(self.core, tags)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prompt beginnings."""
        self.core.reset_prefix_cache()

    def shutdown(self, timeout: float = SHUTDOWN_TIMEOUT) -> None:
        """End the workers and give everything back within ``timeout`` seconds. Idempotent."""
        self._front.shutdown(timeout)

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

    def _run(
        self, prompts: Sequence[PromptTokens], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        submit = partial(self._front.submit, prompts, params)
        return [generation.snapshot() for generation in self._finished(submit)]

    def _finished(
        self, submit: Callable[[list[Generation], Callable[[list[Generation]], Call]], Call]
    ) -> list[Generation]:
        generations: list[Generation] = []
        try:
            self._front.thread.wait(submit(generations, Call))
        except BaseException:
            self._front.thread.abort([generation.request_id for generation in generations])
            raise
        for generation in generations:
            if generation.error is not None:
                raise generation.error
        return generations

    def _stream(self, prompt: PromptTokens, sampling: SamplingParams) -> ResultStream:
        generations: list[Generation] = []
        try:
            stepwise = partial(Call, stepwise=True)
            call = self._front.submit([prompt], [sampling], generations, stepwise)
            return ResultStream(call, self._wait, self._drop)
        except BaseException:
            self._front.thread.abort([generation.request_id for generation in generations])
            raise

    def _wait(self, call: Call) -> None:
        self._front.thread.require_own_process()
        self._front.thread.wait(call)

    def _drop(self, request_id: str) -> None:
        if not self._front.thread.foreign:
            self._front.thread.abort([request_id])
