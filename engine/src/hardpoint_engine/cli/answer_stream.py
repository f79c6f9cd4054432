"""Standard output of ``hardpoint generate``: the answer and nothing else, as it comes."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from hardpoint.sampling_params import SamplingParams

    from hardpoint_engine.llm import LLM
    from hardpoint_engine.outputs import (
        CompletionOutput,
        Logprob,
        RequestOutput,
        TokenLogprobs,
    )
    from hardpoint_engine.request import RequestMetrics
    from hardpoint_engine.result_stream import ResultStream

CLOSED_PIPE = 141
"""Exit code when nobody reads the answer any more: 128 + SIGPIPE, as other programs' in a pipe."""


CONTROLS = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
"""Control characters -> what a terminal shows instead: what a model says moves no cursor, sets no
title and colours nothing.
"""


class ClosedOutputError(Exception):
    """Whoever read standard output has gone."""


class AnswerStream:
    """Writes to ``out`` (standard output), each piece flushed: a pipe gets it at once, too.

    Characters that the output's encoding lacks are replaced, at a terminal also those that control
    it. Raises ClosedOutputError.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self._encoding = getattr(self._out, "encoding", None) or "utf-8"
        self._in_line = False
        self._terminal = self._out.isatty()
        self.muted = False
        """Whether another process says what this one would."""

    @property
    def unicode(self) -> bool:
        """Whether every character can be written."""
        return self._encoding.lower().replace("-", "") == "utf8"

    def write(self, text: str) -> None:
        """Write and flush ``text``."""
        if not text or self.muted:
            return
        if self._terminal:
            text = text.translate(CONTROLS)
        if not self.unicode:
            text = text.encode(self._encoding, "replace").decode(self._encoding)
        try:
            self._out.write(text)
            self._out.flush()
        except BrokenPipeError:
            raise ClosedOutputError from None
        self._in_line = not text.endswith("\n")

    def mute(self) -> None:
        """Write nothing from now on."""
        self.muted = True

    def end_line(self) -> None:
        """End the line that is begun, if any: what comes next is something else."""
        if self._in_line:
            self.write("\n")


def show_answers(
    streams: Sequence[ResultStream], out: AnswerStream, before: Callable[[int], None]
) -> list[RequestOutput]:
    """Write all answers in order, the current one as it grows, each ending its line; return the
    results. ``before`` is called with each prompt's index ahead of its answers.
    """
    results = []
    for index, stream in enumerate(streams):
        before(index)
        current, shown, last = 0, 0, None
        for result in stream:
            last = result
            while current < len(result.outputs):
                answer = result.outputs[current]
                out.write(answer.text[shown:])
                shown = len(answer.text)
                if not answer.finished:
                    break
                out.write("" if answer.text.endswith("\n") else "\n")
                current, shown = current + 1, 0
        if last is not None:
            results.append(last)
    return results


def last_results(streams: Sequence[ResultStream]) -> list[RequestOutput]:
    """Generate all answers to their end and return the results."""
    results = []
    for stream in streams:
        last = None
        for result in stream:
            last = result
        if last is not None:
            results.append(last)
    return results


def document(
    llm: LLM,
    executor: str,
    prompts: Sequence[str],
    results: Sequence[RequestOutput],
    sampling: SamplingParams,
) -> dict[str, Any]:
    """Return what ``--json`` prints: one entry for each answer, with the prompt as it was given."""
    return {
        "results": [
            _entry(prompt, result, answer, sampling)
            for prompt, result in zip(prompts, results, strict=True)
            for answer in result.outputs
        ],
        "platform": llm.platform.name,
        "executor": executor,
        "model": str(llm.description.path),
    }


def _entry(
    prompt: str, result: RequestOutput, answer: CompletionOutput, sampling: SamplingParams
) -> dict[str, Any]:
    entry: dict[str, Any] = {"prompt": prompt}
    if sampling.n > 1:
        entry["index"] = answer.index
    return {
        **entry,
        **answer_table(result, answer, sampling),
        "metrics": metrics_table(result.metrics),
    }


def answer_table(
    result: RequestOutput, answer: CompletionOutput, sampling: SamplingParams
) -> dict[str, Any]:
    """Return one of the answers of ``result`` as plain data, and the scores that were asked for."""
    entry: dict[str, Any] = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
    }
    if answer.logprobs is not None:
        entry["logprobs"] = scores_table(answer.token_ids, answer.logprobs, sampling.logprobs)
    if result.prompt_logprobs is not None:
        entry["prompt_logprobs"] = scores_table(
            result.prompt_token_ids, result.prompt_logprobs, sampling.prompt_logprobs
        )
    return entry


def scores_table(
    token_ids: Sequence[int], scores: Sequence[TokenLogprobs | None], count: int | None
) -> list[dict[str, Any] | None]:
    """Return each token's score, and in ``top`` those of the ``count`` best at its place, best
    first (all that were computed if ``count`` is negative); None where there is none.
    """
    table: list[dict[str, Any] | None] = []
    for token_id, position in zip(token_ids, scores, strict=False):
        if position is None or token_id not in position:
            table.append(None)
            continue
        ranked = [(score.rank, other) for other, score in position.items() if score.rank]
        most = len(ranked) if count is None or count < 0 else count
        top = [_score(other, position[other]) for _, other in sorted(ranked)[:most]]
        table.append({**_score(token_id, position[token_id]), "top": top})
    return table


def _score(token_id: int, score: Logprob) -> dict[str, Any]:
    return {
        "token_id": token_id,
        "token": score.decoded_token,
        "logprob": score.logprob if math.isfinite(score.logprob) else None,  # JSON has no infinity
        "rank": score.rank,
    }


def metrics_table(metrics: RequestMetrics | None) -> dict[str, Any] | None:
    """Return a request's metrics as plain data, times in seconds."""
    if metrics is None:
        return None
    names = (
        "num_prompt_tokens",
        "num_generation_tokens",
        "num_cached_tokens",
        "num_preemptions",
        "queue_time",
        "time_to_first_token",
        "time_per_output_token",
        "e2e_latency",
    )
    return {name: getattr(metrics, name) for name in names}


def write_document(content: dict[str, Any], out: AnswerStream) -> None:
    """Write the one JSON document."""
    out.write(json.dumps(content, ensure_ascii=not out.unicode) + "\n")


def discard_output() -> None:
    """Send what is still buffered for standard output to nowhere, so that the end stays quiet."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
