"""``hardpoint generate``, carried out."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hardpoint.cli_text import one_line
from hardpoint.config import Config
from hardpoint.errors import HardpointError, InvalidRequestError
from hardpoint.sampling_params import SamplingParams

from hardpoint_engine.cli import answer_stream
from hardpoint_engine.cli.answer_stream import AnswerStream, ClosedOutputError
from hardpoint_engine.cli.command_options import sampling_of
from hardpoint_engine.cli.late_collection import late_collection
from hardpoint_engine.cli.starting import (
    configuration,
    conversation_options,
    executor_name,
    local_error,
    log_to_standard_error,
    tell,
    tell_choice,
)
from hardpoint_engine.cli.tracing import Watch, tracing
from hardpoint_engine.conversations import ChatOptions
from hardpoint_engine.llm import LLM
from hardpoint_engine.outputs import RequestOutput
from hardpoint_engine.prompts import numbered
from hardpoint_engine.result_stream import ResultStream

STANDARD_INPUT = "-"
SHOWN_PROMPT = 72
"""Characters of a prompt that are shown above its answer."""


def run(prompts: Sequence[str], options: Mapping[str, Any], *, raw: bool, as_json: bool) -> int:
    """Do what the command line says and return the exit code. Raises HardpointError for all that is
    worth a paragraph.

    What can be refused without the model is refused before it is loaded.
    """
    out = AnswerStream()
    texts = read_prompts(prompts, raw=raw)
    chat = conversation_options(options, raw=raw)
    config = configuration(options)
    sampling = sampling_of(options, seeded=config.model.seed is not None)
    if not as_json:
        refuse_scores(sampling)
    log_to_standard_error(config)
    try:
        with tracing(options["trace"]) as watch:
            _generate(texts, config, sampling, out, chat, watch, as_json=as_json)
    except HardpointError as error:
        out.end_line()
        raise local_error(error) from None
    except ClosedOutputError:
        answer_stream.discard_output()
        return answer_stream.CLOSED_PIPE
    return 0


def _generate(
    texts: Sequence[str],
    config: Config,
    sampling: SamplingParams,
    out: AnswerStream,
    chat: ChatOptions | None,
    watch: Watch,
    *,
    as_json: bool,
) -> None:
    chosen = partial(tell_choice, sampling=sampling, out=out)
    with (
        late_collection() as built,
        LLM.from_config(config, chat=chat is not None, chosen=chosen) as llm,
        watch(llm.core),
    ):
        built()
        streams = [
            _queue(llm, text, sampling, index, len(texts), chat) for index, text in enumerate(texts)
        ]
        if as_json:
            results = answer_stream.last_results(streams)
            executor = executor_name(llm.config, llm.platform)
            content = answer_stream.document(llm, executor, texts, results, sampling)
            answer_stream.write_document(content, out)
        else:
            results = answer_stream.show_answers(
                streams, out, before=partial(_tell_prompt, texts, out)
            )
        if not out.muted:
            _tell_of_cuts(results)


def _queue(
    llm: LLM,
    text: str,
    sampling: SamplingParams,
    index: int,
    count: int,
    chat: ChatOptions | None,
) -> ResultStream:
    try:
        if chat is None:
            return llm.stream(text, sampling)
        return llm.stream_chat([{"role": "user", "content": text}], sampling, **chat)
    except InvalidRequestError as error:
        raise numbered(error, index, count) from error


def read_prompts(prompts: Sequence[str], *, raw: bool) -> list[str]:
    """Return the prompts, ``-`` read from standard input without its last line end.

    Raises InvalidRequestError for an empty one; a question of blanks alone is empty, too.
    """
    texts = []
    for index, given in enumerate(prompts):
        text = read_standard_input() if given == STANDARD_INPUT else given
        if not text or not (raw or text.strip()):
            where = f" {index + 1} of {len(prompts)}" if len(prompts) > 1 else ""
            raise InvalidRequestError(
                f"the prompt{where} is empty; give a question, or - to read it from standard input",
                field="prompt",
                value=text,
            )
        texts.append(text)
    return texts


def read_standard_input() -> str:
    """Return standard input as text. Raises InvalidRequestError if it is not UTF-8."""
    data = sys.stdin.buffer.read()
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"standard input is not UTF-8 at byte {error.start}", field="prompt", value="-"
        ) from None


def refuse_scores(sampling: SamplingParams) -> None:
    """Raise InvalidRequestError for scores that only a document could show."""
    for name in ("logprobs", "prompt_logprobs"):
        if (value := getattr(sampling, name)) is not None:
            flag = "--" + name.replace("_", "-")
            raise InvalidRequestError(
                f"{flag} is shown with --json only: add --json, or leave {flag} out",
                field=name,
                value=value,
            )


def _tell_prompt(texts: Sequence[str], out: AnswerStream, index: int) -> None:
    """Say whose answer comes next, where there are several prompts."""
    if len(texts) > 1 and not out.muted:
        shown = one_line(texts[index])
        if len(shown) > SHOWN_PROMPT:
            shown = f"{shown[: SHOWN_PROMPT - 3]}..."
        print(f"== {shown}", file=sys.stderr, flush=True)  # noqa: T201 - a command's own words


def _tell_of_cuts(results: Sequence[RequestOutput]) -> None:
    if any(answer.finish_reason == "length" for result in results for answer in result.outputs):
        tell("an answer ended at its length limit (--max-tokens, --max-model-len)")
