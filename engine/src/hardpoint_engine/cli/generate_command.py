"""``hardpoint generate``, carried out."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hardpoint.cli_options import given_flags
from hardpoint.cli_text import one_line
from hardpoint.config import Config
from hardpoint.config.loading import load_config
from hardpoint.errors import HardpointError, InvalidRequestError, RemoteError
from hardpoint.platform import Platform, RequestView
from hardpoint.sampling_params import SamplingParams
from hardpoint.selection import default_executor

from hardpoint_engine.build import Choice
from hardpoint_engine.cli import answer_stream
from hardpoint_engine.cli.answer_stream import AnswerStream, ClosedOutputError
from hardpoint_engine.cli.command_options import sampling_of
from hardpoint_engine.llm import LLM
from hardpoint_engine.outputs import RequestOutput
from hardpoint_engine.prompts import numbered, split
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
    config = load_config(
        flags=given_flags(options), file=options["config_file"], sets=options["sets"]
    )
    sampling = sampling_of(options, seeded=config.model.seed is not None)
    if not as_json:
        refuse_scores(sampling)
    logging.basicConfig(
        stream=sys.stderr,
        level=config.observability.log_level.upper(),
        format="%(levelname)s %(name)s: %(message)s",
    )
    try:
        _generate(texts, config, sampling, out, raw=raw, as_json=as_json)
    except HardpointError as error:
        out.end_line()
        raise (local_error(error) if isinstance(error, RemoteError) else error) from None
    except ClosedOutputError:
        answer_stream.discard_output()
        return answer_stream.CLOSED_PIPE
    return 0


def _generate(
    texts: Sequence[str],
    config: Config,
    sampling: SamplingParams,
    out: AnswerStream,
    *,
    raw: bool,
    as_json: bool,
) -> None:
    chosen = partial(_tell_choice, sampling=sampling)
    with LLM.from_config(config, chat=not raw, chosen=chosen) as llm:
        streams = [
            _queue(llm, text, sampling, index, len(texts), raw=raw)
            for index, text in enumerate(texts)
        ]
        if as_json:
            results = answer_stream.last_results(streams)
            executor = executor_name(llm.config, llm.platform)
            content = answer_stream.document(llm, executor, texts, results, sampling)
            answer_stream.write_document(content, out)
        else:
            results = answer_stream.show_answers(streams, out, before=partial(_tell_prompt, texts))
        _tell_of_cuts(results)


def _queue(
    llm: LLM, text: str, sampling: SamplingParams, index: int, count: int, *, raw: bool
) -> ResultStream:
    try:
        if raw:
            return llm.stream(text, sampling)
        return llm.stream_chat([{"role": "user", "content": text}], sampling)
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


def local_error(error: RemoteError) -> HardpointError:
    """Return what a worker raised as a person wants it: the worker's own sentence if it was raised
    on purpose, else type and message, without the remote traceback (which goes to the log).
    """
    logging.getLogger("hardpoint.generate").info("%s", error)
    cause = error.__cause__
    if isinstance(cause, HardpointError):
        return cause
    last = error.remote_traceback.strip().rpartition("\n")[2] or error.type_name
    return HardpointError(f"worker rank {error.rank} failed: {last} (--log-level info shows where)")


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


def executor_name(config: Config, platform: Platform) -> str:
    """Return the executor's name, or the reference by which it was configured instead."""
    chosen = config.executor
    if chosen is None:
        return default_executor(platform.placement(config))
    return chosen if isinstance(chosen, str) else f"{chosen.__module__}:{chosen.__qualname__}"


def _tell_choice(choice: Choice, sampling: SamplingParams) -> None:
    """Say what was chosen, and of whom; refuse what the platform would refuse of every prompt."""
    for name, verdict in choice.verdicts:
        answer = "unavailable"
        if verdict.available:
            answer = "for use by name" if verdict.priority < 0 else "available"
        _tell(f"platform {name} is {answer}: {one_line(verdict.reason)}")
    config, platform = choice.config, choice.platform
    model = "" if config.description is None else config.description.path.name
    executor = executor_name(config, platform)
    _tell(f"{model} on platform {platform.name}, executor {executor}")
    view = RequestView(req_id="", num_prompt_tokens=1, sampling=split(sampling)[0])
    if (problem := platform.check_request(view)) is not None:
        raise InvalidRequestError(str(problem), field=problem.key, value=problem.value)


def _tell_prompt(texts: Sequence[str], index: int) -> None:
    """Say whose answer comes next, where there are several prompts."""
    if len(texts) > 1:
        shown = one_line(texts[index])
        if len(shown) > SHOWN_PROMPT:
            shown = f"{shown[: SHOWN_PROMPT - 3]}..."
        print(f"== {shown}", file=sys.stderr, flush=True)  # noqa: T201 - a command's own words


def _tell(text: str) -> None:
    print(f"hardpoint: {text}", file=sys.stderr, flush=True)  # noqa: T201 - a command's own words


def _tell_of_cuts(results: Sequence[RequestOutput]) -> None:
    if any(answer.finish_reason == "length" for result in results for answer in result.outputs):
        _tell("an answer ended at its length limit (--max-tokens, --max-model-len)")
