"""The text side of a request: ids and scores from the engine become answers. Driver side."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hardpoint.messages import Logprobs
from hardpoint.sampling_params import SamplingParams

from hardpoint_engine.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from hardpoint_engine.request import EngineOutput, RequestMetrics
from hardpoint_engine.scheduling.stopping import FinishReason
from hardpoint_engine.text.stop_strings import StopStrings
from hardpoint_engine.text.tokenizer import Tokenizer


class Completion:
    """One answer as it grows."""

    def __init__(self, index: int, sampling: SamplingParams, tokenizer: Tokenizer) -> None:
        self.index = index
        self.token_ids: list[int] = []
        asks = sampling.logprobs is not None or sampling.logprob_token_ids
        self.logprobs: list[TokenLogprobs] | None = [] if asks else None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._text = ""
        self._held = 0
        self._stops = StopStrings(sampling.stop)
        self._detokenizer = (
            tokenizer.detokenizer(skip_special_tokens=sampling.skip_special_tokens)
            if sampling.detokenize
            else None
        )

    @property
    def finished(self) -> bool:
        """Whether it will not change any more."""
        return self.finish_reason is not None

    def add(self, output: EngineOutput) -> bool:
        """Take one step's tokens; return whether a stop string ended the answer just now, so that
        the engine has to be told.
        """
        if self.finished:
            return False
        last = len(output.new_tokens) - 1
        for index, token in enumerate(output.new_tokens):
            self.token_ids.append(token)
            if self.logprobs is not None and output.logprobs is not None:
                self.logprobs.append(token_logprobs(output.logprobs, index, self._tokenizer))
            ends = index == last and output.finish_reason == "stop" and not output.ends_in_text
            if (not ends or self._sampling.include_stop) and self._add_text(token):
                return True
        if output.finish_reason is not None:
            self.finish(output.finish_reason, output.stop_reason)
        return False

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End the answer: what was held back is text now."""
        if self._detokenizer is not None:
            self._text += self._detokenizer.finish()
        self._held = 0
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def snapshot(self) -> CompletionOutput:
        """Return the answer as it is now."""
        return CompletionOutput(
            index=self.index,
            text=self._text[: len(self._text) - self._held],
            token_ids=list(self.token_ids),
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _add_text(self, token: int) -> bool:
        """Return whether a stop string is complete now. It counts only beyond ``min_tokens``."""
        if self._detokenizer is None:
            return False
        piece = self._detokenizer.add(token)
        self._text += piece
        if not piece or not self._sampling.stop:
            return False
        match = self._stops.add(piece)
        if match is not None and len(self.token_ids) > self._sampling.min_tokens:
            self._text = self._text[: match.end if self._sampling.include_stop else match.begin]
            self._detokenizer = None
            self.finish("stop", match.stop)
            return True
        self._held = self._stops.held
        return False


class Generation:
    """One request with its ``n`` answers. ``changed`` says whether a snapshot would tell more than
    the last one, ``ends_by_text`` whether an answer may end by its text, of which only :meth:`add`
    can tell. It grows on one thread and may be looked at on others.
    """

    def __init__(
        self,
        *,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        tokenizer: Tokenizer,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.completions = [Completion(i, sampling, tokenizer) for i in range(sampling.n)]
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.metrics: RequestMetrics | None = None
        self.error: BaseException | None = None
        self.pooled: tuple[float, ...] | None = None
        self.changed = False
        self.ends_by_text = bool(sampling.stop) and sampling.detokenize
        self._tokenizer = tokenizer
        self._open = len(self.completions)
        self._lock = threading.RLock()

    @property
    def finished(self) -> bool:
        """Whether all answers are complete and the engine has said its last word on each."""
        return self._open == 0

    def add(self, index: int, output: EngineOutput) -> bool:
        """Take one step's output for answer ``index``; return whether a stop string ended it."""
        with self._lock:
            if output.prompt_logprobs is not None and self.prompt_logprobs is None:
                rows = output.prompt_logprobs
                scores = [
                    token_logprobs(rows, row, self._tokenizer) for row in range(len(rows.ids))
                ]
                self.prompt_logprobs = [None, *scores]
            self.metrics = output.metrics or self.metrics
            self.error = self.error or output.error
            self.pooled = output.pooled or self.pooled
            stopped = self.completions[index].add(output)
            if output.finish_reason is not None and self._open:
                self._open -= 1
            self.changed = True
            return stopped

    def fail(self, error: BaseException) -> None:
        """End all answers that are still open by ``error``."""
        with self._lock:
            if not self.finished:
                self.error = self.error or error
                self.end("error")

    def end(self, reason: FinishReason) -> None:
        """End all answers that are still open for ``reason``, without waiting for the engine."""
        with self._lock:
            for completion in self.completions:
                if not completion.finished:
                    completion.finish(reason)
            self.changed = self.changed or not self.finished
            self._open = 0

    def snapshot(self) -> RequestOutput:
        """Return the request as it is now."""
        with self._lock:
            now = RequestOutput(
                request_id=self.request_id,
                prompt=self.prompt,
                prompt_token_ids=list(self.prompt_token_ids),
                outputs=[completion.snapshot() for completion in self.completions],
                finished=self.finished,
                prompt_logprobs=self.prompt_logprobs,
                metrics=self.metrics,
                error=self.error,
            )
            self.changed = False
            return now


def token_logprobs(rows: Logprobs, row: int, tokenizer: Tokenizer) -> TokenLogprobs:
    """Return row ``row`` by token id; listed ones have no rank."""
    scores: TokenLogprobs = {}
    for column, (token, value) in enumerate(zip(rows.ids[row], rows.values[row], strict=True)):
        if token not in scores:  # the first token may come again among the best
            ranked = column <= rows.num_best
            scores[token] = Logprob(
                logprob=value,
                rank=rows.ranks[row][column] if ranked else None,
                decoded_token=tokenizer.decode([token], skip_special_tokens=False),
            )
    return scores
