"""``hardpoint chat``, carried out: a conversation at a terminal, or from a pipe, a line a turn."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from hardpoint.errors import HardpointError, InvalidRequestError
from hardpoint.sampling_params import SamplingParams

from hardpoint_engine.cli import answer_stream
from hardpoint_engine.cli.answer_stream import AnswerStream, ClosedOutputError
from hardpoint_engine.cli.command_options import sampling_of
from hardpoint_engine.cli.conversation import Conversation
from hardpoint_engine.cli.interruption import Interrupted, keyboard_interrupts
from hardpoint_engine.cli.late_collection import late_collection
from hardpoint_engine.cli.starting import (
    configuration,
    local_error,
    log_to_standard_error,
    read_template,
    tell,
    tell_choice,
)
from hardpoint_engine.llm import LLM

HELP = (
    "/system TEXT sets the system message (without a text: shows it), /reset forgets the turns so "
    "far, /quit or Ctrl-D ends, Ctrl-C stops an answer; // begins a text with /"
)
AT_PROMPT = "> "


def run(options: Mapping[str, Any]) -> int:
    """Do what the command line says and return the exit code: 1 if a turn of a pipe failed.

    Raises HardpointError for what ends the conversation.
    """
    out = AnswerStream()
    config = configuration(options)
    sampling = sampling_of(options, seeded=config.model.seed is not None)
    _refuse_unshown(sampling)
    template = read_template(options["chat_template"])
    log_to_standard_error(config)
    chosen = partial(tell_choice, sampling=sampling)
    try:
        with (
            late_collection() as built,
            LLM.from_config(config, chat=True, chosen=chosen) as llm,
        ):
            built()
            conversation = Conversation(
                partial(llm.tokenize_chat, chat_template=template),
                length=llm.core.max_model_len,
                max_tokens=sampling.max_tokens,
                system=options["system"],
            )
            with keyboard_interrupts():
                return _Chat(llm, conversation, sampling, out).serve()
    except HardpointError as error:
        out.end_line()
        raise local_error(error) from None
    except ClosedOutputError:
        answer_stream.discard_output()
        return answer_stream.CLOSED_PIPE


def _refuse_unshown(sampling: SamplingParams) -> None:
    """Raise InvalidRequestError for what a conversation would compute and not show."""
    for name, usual in (("n", 1), ("logprobs", None), ("prompt_logprobs", None)):
        if (value := getattr(sampling, name)) != usual:
            flag = "--" + name.replace("_", "-")
            raise InvalidRequestError(
                f"{flag} {value}: a turn has one answer, of text alone; leave {flag} out, or see "
                "hardpoint generate --json",
                field=name,
                value=value,
            )


class _Chat:
    """Reads lines and answers them."""

    def __init__(
        self, llm: LLM, conversation: Conversation, sampling: SamplingParams, out: AnswerStream
    ) -> None:
        self._llm = llm
        self._conversation = conversation
        self._sampling = sampling
        self._out = out
        self._failed = False
        self._at_terminal = sys.stdin.isatty()

    def serve(self) -> int:
        """Serve until the lines end, or a second Ctrl-C in a row comes without a line between."""
        if self._at_terminal:
            import readline  # noqa: F401 - gives input() a history and line editing

            tell(HELP)
        interrupts = 0
        while True:
            try:
                line = self._read()
                interrupts = 0
                if line is None or not self._obey(line.strip()):
                    break
            except Interrupted:
                raise
            except KeyboardInterrupt:
                interrupts += 1
                self._out.end_line()
                if interrupts == 2 or not self._at_terminal:
                    break
                print(file=sys.stderr)  # noqa: T201 - a command's own words
                tell("Ctrl-C again, Ctrl-D or /quit ends")
        return int(self._failed and not self._at_terminal)

    def _read(self) -> str | None:
        """Return the next line, None at the end."""
        try:
            if self._at_terminal and sys.stdout.isatty():
                return input(AT_PROMPT)
            if self._at_terminal:
                print(AT_PROMPT, end="", file=sys.stderr, flush=True)  # noqa: T201 - the prompt
            return sys.stdin.readline() or None
        except EOFError:
            self._out.write("\n")
            return None
        except UnicodeDecodeError as error:
            self._failed = True
            tell(f"a line is not UTF-8: {error}")
            return ""

    def _obey(self, line: str) -> bool:
        """Do what a line says; False if it ends the conversation."""
        if not line.startswith("/") or line.startswith("//"):
            if line:
                self._answer(line.removeprefix("/") if line.startswith("//") else line)
            return True
        word, _, rest = line.partition(" ")
        if word in ("/quit", "/exit"):
            return False
        if word == "/reset":
            self._conversation.reset()
        elif word == "/system" and rest.strip():
            self._conversation.system = rest.strip()
        elif word == "/system":
            tell(f"system message: {self._conversation.system or 'none'}")
        else:
            tell(HELP if word == "/help" else f"there is no command {word}: {HELP}")
            self._failed = self._failed or word != "/help"
        return True

    def _answer(self, question: str) -> None:
        """Answer ``question``. What is wrong with it alone is said, and it is forgotten."""
        answer = ""
        try:
            ids, dropped = self._conversation.ask(question)
            if dropped:
                turns = "turn was" if dropped == 1 else f"{dropped} turns were"
                tell(f"the oldest {turns} left out: the conversation outgrew max_model_len")
            with self._llm.stream(ids, self._sampling) as stream:
                for result in stream:
                    text = result.outputs[0].text
                    self._out.write(text[len(answer) :])
                    answer = text
                    if result.outputs[0].finish_reason == "length":
                        self._out.end_line()
                        tell("the answer ended at its length limit")
            self._out.end_line()
        except Interrupted:
            raise
        except KeyboardInterrupt:
            self._out.end_line()
            tell("stopped")
            if not self._at_terminal:
                raise
        except HardpointError as error:
            if not self._llm.core.alive:
                raise
            self._out.end_line()
            self._failed = True
            tell(str(local_error(error)))
            return
        if answer:  # also as far as it came before it was stopped
            self._conversation.answered(question, answer)
