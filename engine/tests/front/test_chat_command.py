"""``hardpoint chat`` as a person meets it: a real terminal, a real pipe, real signals."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hardpoint_engine import LLM, SamplingParams
from hardpoint_engine.cli.conversation import Conversation

HARDPOINT = str(Path(sys.executable).with_name("hardpoint"))
DUMMY = ("--platform", "dummy", "--load-format", "dummy", "--max-model-len", "256")
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"
WAIT = 30


@pytest.fixture
def template(tmp_path) -> str:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


@pytest.fixture
def llm():
    with LLM(platform="dummy", load_format="dummy", max_model_len=256) as llm:
        yield llm


def piped(data: str, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [HARDPOINT, "chat", *DUMMY, *arguments],
        input=data.encode(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_a_line_of_a_pipe_is_a_turn_and_turns_are_kept(template, llm):
    code, out, errors = piped(
        "one\n\n//two\n/reset\n/system be brief\n/system\nthree\n/quit\nfour\n",
        "--chat-template", template, "--max-tokens", "6", "--system", "hi",
    )  # fmt: skip
    assert code == 0
    sampling = SamplingParams(temperature=0, max_tokens=6)

    def answer(prompt: str) -> str:
        return llm.generate(prompt, sampling)[0].outputs[0].text

    def line(text: str) -> str:
        return text if text.endswith("\n") else f"{text}\n"

    first = answer("s:hi\nu:one\na:")
    second = answer(f"s:hi\nu:one\na:{first}\nu:/two\na:")
    third = answer("s:be brief\nu:three\na:")
    assert out == line(first) + line(second) + line(third)
    assert "hardpoint: system message: be brief" in errors
    assert "> " not in out + errors


@pytest.mark.parametrize("flag", ["--n", "--logprobs", "--prompt-logprobs"])
def test_what_no_turn_would_show_is_refused(flag, template):
    code, out, errors = piped("one\n", "--chat-template", template, flag, "2")
    assert (code, out) == (2, "")
    assert f"{flag} 2: a turn has one answer, of text alone; leave {flag} out" in errors


def test_what_is_wrong_with_one_turn_ends_no_other(template):
    code, out, errors = piped(
        "fine\n/bogus\n" + "x" * 300 + "\nfine\n", "--chat-template", template, "--max-tokens", "3"
    )
    assert code == 1
    assert "there is no command /bogus" in errors
    assert "raise --max-model-len" in errors
    first, second = re.findall(r"(?s)\A(.*?\n)(.*)\Z", out)[0]
    assert first
    assert second
    code, out, errors = piped("fine\n")  # the dummy model has no template
    assert (code, out) == (1, "")
    assert "has no chat template" in errors


def test_a_turn_that_fails_in_the_middle_is_forgotten(tmp_path):
    alone = tmp_path / "alone.jinja"
    alone.write_text(
        "{% if messages | length > 1 %}{{ raise_exception('it was kept') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    code, out, errors = piped(
        "one\ntwo\n", "--chat-template", str(alone), "--max-tokens", "6",
        "--allowed-token-ids", "97,98", "--set", "plugins.dummy.fail_at=step:4",
    )  # fmt: skip
    assert code == 1
    assert "it was kept" not in errors
    partial, whole, _ = out.split("\n")
    assert 1 <= len(partial) < len(whole) == 6


def test_the_oldest_turns_are_left_out_by_name(template):
    lines = "".join(f"{number}" * 60 + "\n" for number in range(5))
    code, _, errors = piped(lines, "--chat-template", template, "--max-tokens", "4")
    assert code == 0
    assert "the oldest turn was left out: the conversation outgrew max_model_len" in errors


def test_the_second_turn_computes_little_more_than_itself(llm):
    """The first turn is found in the prefix cache, by whole blocks."""
    sampling = SamplingParams(temperature=0, max_tokens=16, allowed_token_ids=(97, 98, 99))

    def tokenize(messages) -> list[int]:
        return llm.tokenize_chat(messages, chat_template=TEMPLATE)

    conversation = Conversation(tokenize, length=256, max_tokens=16, system="s" * 50)
    ids, _ = conversation.ask("one")
    (first,) = llm.generate(ids, sampling)
    conversation.answered("one", first.outputs[0].text)
    before = llm.metrics.computed_tokens
    again, _ = conversation.ask("two")
    assert again[: len(ids)] == ids
    (second,) = llm.generate(again, sampling)
    block = llm.config.cache.block_size
    known = len(ids) + len(first.outputs[0].token_ids) - 1
    assert second.metrics.num_cached_tokens == known // block * block
    computed = llm.metrics.computed_tokens - before
    assert (
        computed
        == len(again) - second.metrics.num_cached_tokens + len(second.outputs[0].token_ids) - 1
    )


class Terminal:
    """A command that has a terminal for itself."""

    def __init__(self, *arguments: str) -> None:
        ours, theirs = os.openpty()
        self._handle = ours
        self.shown = ""
        self.process = subprocess.Popen(
            [HARDPOINT, "chat", *DUMMY, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - no other way to a terminal
            env={**os.environ, "TERM": "dumb", "INPUTRC": os.devnull},
        )
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._handle, text.encode())

    def interrupt_input(self, pattern: str) -> None:
        """Press Ctrl-C at the prompt and expect ``pattern``. While Python's readline handles a key
        it does not see a signal, nor later, until the next signal: then it is pressed again.
        """
        self.type(INTERRUPT)
        try:
            self.expect(pattern, 5)
        except AssertionError:
            self.type(INTERRUPT)
            self.expect(pattern)

    def expect(self, pattern: str, seconds: float = WAIT) -> str:
        """Wait until ``pattern`` is shown; return what was up to its end, and forget that."""
        deadline = time.monotonic() + seconds
        while (found := re.search(pattern, self.shown, re.DOTALL)) is None:
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} is not in {self.shown!r}"
            if select.select([self._handle], [], [], min(left, 1))[0]:
                try:
                    self.shown += os.read(self._handle, 4096).decode(errors="replace")
                except OSError:  # the other side is closed
                    assert re.search(pattern, self.shown, re.DOTALL), (pattern, self.shown)
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before

    def end(self) -> int:
        code = self.process.wait(WAIT)
        os.close(self._handle)
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.end()


@pytest.fixture
def terminal():
    begun = []

    def begin(*arguments: str) -> Terminal:
        begun.append(Terminal(*arguments))
        return begun[-1]

    yield begin
    for each in begun:
        each.kill()


SLOW = ("--set", "plugins.dummy.step_seconds=0.1", "--allowed-token-ids", "97,98")
INTERRUPT, END, UP = "\x03", "\x04", "\x1b[A"


@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_ctrl_c_stops_the_answer_and_not_the_conversation(terminal, template, executor):
    chat = terminal(
        "--chat-template", template, "--max-tokens", "150", "--executor", executor, *SLOW
    )
    chat.expect("Ctrl-C stops an answer.*> ")
    chat.type("one\n")
    chat.expect("one\r\n[ab]")
    chat.type(INTERRUPT)
    chat.expect("hardpoint: stopped.*> ")
    chat.type("/reset\n")
    chat.expect("> ")
    chat.type(UP + UP + "\n")  # the first question again, from the history
    chat.expect("one[ \b]*\r\n[ab]")
    chat.type(INTERRUPT)
    chat.expect("hardpoint: stopped.*> ")
    chat.type("half a line")
    chat.expect("half a line")
    chat.interrupt_input("Ctrl-C again, Ctrl-D or /quit ends.*> ")
    chat.type("two\n")  # the count begins anew
    chat.expect("two\r\n[ab]")
    chat.type(INTERRUPT)
    chat.expect("hardpoint: stopped.*> ")
    chat.interrupt_input("Ctrl-C again.*> ")
    chat.type(INTERRUPT)
    with suppress(subprocess.TimeoutExpired):  # see interrupt_input
        chat.process.wait(5)
    if chat.process.poll() is None:
        chat.type(INTERRUPT)
    assert chat.end() == 0


def test_ctrl_d_ends_and_a_signal_ends_an_answer(terminal, template):
    chat = terminal("--chat-template", template, "--max-tokens", "3")
    chat.expect("> ")
    chat.type("one\n")
    chat.expect("length limit.*> ")
    chat.type(END)
    assert chat.end() == 0
    chat = terminal("--chat-template", template, "--max-tokens", "150", *SLOW)
    chat.expect("> ")
    chat.type("one\n")
    chat.expect("one\r\n[ab]")
    chat.process.send_signal(signal.SIGTERM)
    assert chat.end() == 128 + signal.SIGTERM
