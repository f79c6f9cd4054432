"""The front of the engine for asyncio. Runs in the driver, on the event loop that calls it; what
takes time (tokenizing, templates, starting, ending) is done on other threads.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from hardpoint.config import Config
from hardpoint.config.loading import load_config
from hardpoint.pooling_params import PoolingParams
from hardpoint.sampling_params import SamplingParams

from hardpoint_engine.async_call import AsyncCall, LoopBell
from hardpoint_engine.completion import Generation
from hardpoint_engine.conversations import ChatOptions, Messages, check_options
from hardpoint_engine.front import SHUTDOWN_TIMEOUT, Front, embedding_of
from hardpoint_engine.outputs import EmbeddingOutput, RequestOutput
from hardpoint_engine.prompts import Prompt, PromptTokens, as_list, as_one_params
from hardpoint_engine.text.template_pool import MOST_AT_ONCE

if TYPE_CHECKING:
    from hardpoint.executor import Executor

    from hardpoint_engine.core import EngineCore

T = TypeVar("T")


class AsyncLLM:
    """A model that is ready to generate, for one event loop: ``await AsyncLLM.start(...)`` inside
    it, with what :class:`hardpoint_engine.LLM` takes. Use it in an ``async with`` block, or await
    :meth:`shutdown`. Any number of requests may be open; they are computed together, whether or not
    their callers keep up.
    """

    def __init__(self, front: Front) -> None:
        """Called by :meth:`start`, on the loop."""
        self._front = front
        self._bell = LoopBell(asyncio.get_running_loop())
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hardpoint-async")
        self._templates = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="hardpoint-chat")

    @classmethod
    async def start(cls, model: str | os.PathLike[str] | None = None, **keys: Any) -> Self:
        """Start an engine. Raises what ``LLM(...)`` raises."""
        return await cls.from_config(load_config(overrides={"model": model, **keys}))

    @classmethod
    async def from_config(cls, config: Config, *, chat: bool = False) -> Self:
        """Start with a configuration that is loaded already. Cancelled, it ends what it started."""
        made = asyncio.get_running_loop().run_in_executor(None, partial(Front, config, chat=chat))
        try:
            return cls(await asyncio.shield(made))
        except asyncio.CancelledError:
            made.add_done_callback(_end_late)
            raise

    @property
    def core(self) -> EngineCore:
        """The engine itself."""
        return self._front.core

    @property
    def executor(self) -> Executor:
        """The executor that was chosen."""
        return self._front.core.executor

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncResultStream:
        """Continue one prompt, a text or token ids, as it is; return its growing answer. What is
        wrong with it is raised by the first step of the iteration.
        """
        read = partial(self._front.tokens, [prompt])
        return AsyncResultStream(self, read, sampling_params)

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncResultStream:
        """Answer one conversation, as :meth:`hardpoint_engine.LLM.chat` takes it; return its
        growing answer. What is wrong with it is raised by the first step of the iteration.
        """
        check_options(options)
        read = partial(self._front.chat_tokens, messages, options, one=True)
        return AsyncResultStream(self, read, sampling_params, pool=self._templates)

    async def embed(
        self, prompts: Prompt | Sequence[Prompt], pooling: str | PoolingParams = "mean"
    ) -> list[EmbeddingOutput]:
        """Return a vector for each prompt, as :meth:`hardpoint_engine.LLM.embed` does. Cancelled,
        it aborts them.
        """
        made = partial(AsyncCall, bell=self._bell, stepwise=False)
        submit = partial(self._front.submit_embeddings, as_list(prompts), pooling, [], made)
        submitted = asyncio.ensure_future(self._aside(submit))
        try:
            call = await asyncio.shield(submitted)
            await self.wait(call)
        except BaseException:
            _leave(self, submitted)
            raise
        for generation in call.generations:
            if generation.error is not None:
                raise generation.error
        return [embedding_of(generation) for generation in call.generations]

    def abort(self, request_id: str) -> None:
        """End a request, in whatever state; unknown and finished ids are let pass. Never waits."""
        self._front.thread.require_own_process()
        self._front.thread.abort([request_id])

    async def collective_rpc(
        self, method: str | Callable[..., Any], *, args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None, timeout: float | None = None,
        reply_rank: int | None = None,
    ) -> Any:  # fmt: skip
        """Call a method on every worker; see :meth:`hardpoint.executor.Executor.collective_rpc`."""
        call = partial(
            self.executor.collective_rpc, method, args=args, kwargs=kwargs, timeout=timeout,
            non_block=True, reply_rank=reply_rank,
        )  # fmt: skip
        return await asyncio.wrap_future(await self._aside(call))

    async def shutdown(self, timeout: float = SHUTDOWN_TIMEOUT) -> None:
        """End the workers and give everything back within ``timeout`` seconds. Requests that are
        open end by ExecutorFailedError. Idempotent.
        """
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._front.shutdown, timeout)
        for pool in (self._pool, self._templates):
            pool.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.shutdown()

    # For its streams.

    async def submit(
        self,
        read: Callable[[], list[PromptTokens]],
        sampling: SamplingParams | None,
        pool: ThreadPoolExecutor | None,
    ) -> AsyncCall:
        """Queue one request; what ``read`` returns is its prompt. It is read on a thread of
        ``pool``, None: in the order of the calls.
        """
        return await self._aside(partial(self._submit, read, as_one_params(sampling)), pool)

    def _submit(
        self, read: Callable[[], list[PromptTokens]], sampling: SamplingParams
    ) -> AsyncCall:
        made = partial(AsyncCall, bell=self._bell)
        generations: list[Generation] = []
        return self._front.submit(read(), [sampling], generations, made)

    async def wait(self, call: AsyncCall) -> None:
        """Return when ``call`` has news. Raises what a step raised meanwhile."""
        await self._front.thread.wait_async(call)

    async def _aside(self, work: Callable[[], T], pool: ThreadPoolExecutor | None = None) -> T:
        """Do ``work`` on a thread of ``pool``, None: in the order of the calls."""
        self._front.require_open()
        return await asyncio.get_running_loop().run_in_executor(pool or self._pool, work)


class AsyncResultStream(AsyncGenerator[RequestOutput, None]):
    """The states of one request, each with all that was generated so far; the last is ``finished``.

    An async generator: what arrived since the last step of the iteration comes as one, and what the
    request failed by is raised. Leaving it early (cancelled, ``aclose``, ``break``) aborts the
    request. Used by one task at a time.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        read: Callable[[], list[PromptTokens]],
        sampling: SamplingParams | None,
        *,
        pool: ThreadPoolExecutor | None = None,
    ) -> None:
        self._llm = llm
        self._submit = partial(llm.submit, read, sampling, pool)
        self._submitted: asyncio.Future[AsyncCall] | None = None
        self._ended = False

    @property
    def request_id(self) -> str | None:
        """The id to abort it by; None before the first step of the iteration."""
        made = self._submitted
        if made is None or not made.done() or made.cancelled() or made.exception() is not None:
            return None
        return made.result().generations[0].request_id

    async def asend(self, value: None) -> RequestOutput:
        """Return the next state. Raises StopAsyncIteration after the last."""
        if self._ended:
            raise StopAsyncIteration
        try:
            if self._submitted is None:
                self._submitted = asyncio.ensure_future(self._submit())
            call = await asyncio.shield(self._submitted)
            await self._llm.wait(call)
            state = call.generations[0].snapshot()
        except BaseException:
            self._leave()
            raise
        self._ended = state.finished
        if state.error is not None:
            raise state.error
        return state

    async def athrow(self, typ: Any, val: Any = None, tb: Any = None) -> RequestOutput:
        """Abort the request and raise what is given."""
        self._leave()
        error = typ if isinstance(typ, BaseException) else (val or typ())
        raise error.with_traceback(tb)

    async def aclose(self) -> None:
        """Abort the request unless it is finished. Idempotent."""
        self._leave()

    def _leave(self) -> None:
        self._ended = True
        if self._submitted is not None:
            _leave(self._llm, self._submitted)

    def __del__(self) -> None:
        if not getattr(self, "_ended", True):
            self._leave()


def _leave(llm: AsyncLLM, submitted: asyncio.Future[AsyncCall]) -> None:
    """Abort what was submitted; what is on its way to the engine, when it arrives."""
    if submitted.done():
        _abort(llm, submitted)
    else:
        submitted.add_done_callback(partial(_abort, llm))


def _abort(llm: AsyncLLM, submitted: asyncio.Future[AsyncCall]) -> None:
    if submitted.cancelled() or submitted.exception() is not None:
        return
    front = llm._front  # noqa: SLF001 - the other half of this module
    open_ids = [each.request_id for each in submitted.result().generations if not each.finished]
    if open_ids and not front.thread.foreign:
        front.thread.abort(open_ids)


def _end_late(made: asyncio.Future[Front]) -> None:
    """End an engine that nobody waits for any more, on a thread; the loop's own may have ended."""
    if not made.cancelled() and made.exception() is None:
        threading.Thread(target=made.result().shutdown, args=(SHUTDOWN_TIMEOUT,)).start()
