"""What every command does that starts an engine: read its configuration, say what was chosen."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardpoint.cli_options import given_flags
from hardpoint.cli_text import one_line
from hardpoint.config import Config
from hardpoint.config.loading import load_config
from hardpoint.errors import HardpointError, InvalidRequestError, RemoteError, UnsupportedError
from hardpoint.platform import Platform, RequestView
from hardpoint.sampling_params import SamplingParams
from hardpoint.selection import default_executor

from hardpoint_engine.build import Choice
from hardpoint_engine.cli.answer_stream import AnswerStream
from hardpoint_engine.conversations import ChatOptions
from hardpoint_engine.prompts import split
from hardpoint_engine.text.chat_template import MOST_CHARACTERS


def configuration(options: Mapping[str, Any]) -> Config:
    """Return the configuration that a command's flags ask for."""
    return load_config(
        flags=given_flags(options), file=options["config_file"], sets=options["sets"]
    )


def log_to_standard_error(config: Config) -> None:
    """Let log lines of the configured level go to standard error."""
    logging.basicConfig(
        stream=sys.stderr,
        level=config.observability.log_level.upper(),
        format="%(levelname)s %(name)s: %(message)s",
    )


def read_template(path: str | None) -> str | None:
    """Return the chat template of ``--chat-template FILE``. Raises InvalidRequestError."""
    if path is None:
        return None
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"--chat-template {path} cannot be read: {error}", field="chat_template", value=path
        ) from None
    if len(text) > MOST_CHARACTERS:
        raise InvalidRequestError(
            f"--chat-template {path} has more than {MOST_CHARACTERS} characters",
            field="chat_template",
            value=path,
        )
    return text


def conversation_options(options: Mapping[str, Any], *, raw: bool) -> ChatOptions | None:
    """Return what the flags say of conversations, None with --raw."""
    if not raw:
        template = read_template(options["chat_template"])
        return {"system": options["system"], "chat_template": template}
    for name in ("system", "chat_template"):
        if options[name] is not None:
            flag = "--" + name.replace("_", "-")
            raise InvalidRequestError(
                f"{flag} is for conversations, and --raw makes none: leave one of them out",
                field=name,
                value=options[name],
            )
    return None


def tell_choice(
    choice: Choice, sampling: SamplingParams | None = None, out: AnswerStream | None = None
) -> None:
    """Say what was chosen, and of whom; refuse what the platform would refuse of every prompt.

    Where several processes run the command and another one speaks for all, ``out`` says nothing
    from now on; without it, the command is not for several processes: raises UnsupportedError.
    """
    if not choice.executor_class.tells_results(choice.config):
        if out is None:
            raise UnsupportedError(
                "this command in several processes at once",
                "hardpoint-engine",
                hint="They may run `hardpoint generate`, or a script.",
            )
        out.mute()
        return
    for name, verdict in choice.verdicts:
        answer = "unavailable"
        if verdict.available:
            answer = "for use by name" if verdict.priority < 0 else "available"
        tell(f"platform {name} is {answer}: {one_line(verdict.reason)}")
    config, platform = choice.config, choice.platform
    model = "" if config.description is None else config.description.path.name
    executor = executor_name(config, platform)
    tell(f"{model} on platform {platform.name}, executor {executor}")
    if sampling is None:
        return
    view = RequestView(req_id="", num_prompt_tokens=1, sampling=split(sampling)[0])
    if (problem := platform.check_request(view)) is not None:
        raise InvalidRequestError(str(problem), field=problem.key, value=problem.value)


def executor_name(config: Config, platform: Platform) -> str:
    """Return the executor's name, or the reference by which it was configured instead."""
    chosen = config.executor
    if chosen is None:
        return default_executor(platform.placement(config))
    return chosen if isinstance(chosen, str) else f"{chosen.__module__}:{chosen.__qualname__}"


def local_error(error: HardpointError) -> HardpointError:
    """Return what a worker raised as a person wants it: the worker's own sentence if it was raised
    on purpose, else type and message, without the remote traceback (which goes to the log).
    """
    if not isinstance(error, RemoteError):
        return error
    logging.getLogger("hardpoint.generate").info("%s\n%s", error, error.remote_traceback)
    cause = error.__cause__
    if isinstance(cause, HardpointError):
        return cause
    last = error.remote_traceback.strip().rpartition("\n")[2] or error.type_name
    return HardpointError(f"worker rank {error.rank} failed: {last} (--log-level info shows where)")


def tell(text: str) -> None:
    """Say something about the command itself."""
    print(f"hardpoint: {text}", file=sys.stderr, flush=True)  # noqa: T201 - a command's own words
