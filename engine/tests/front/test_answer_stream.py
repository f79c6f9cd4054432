"""What a model says, on a terminal and in a file."""

from __future__ import annotations

import io

import pytest
from hardpoint_engine.cli.answer_stream import AnswerStream

ANSWER = "\x1b]0;title\x07\x1b[2J\r\x9b1mone\ttwo\x7f\n日本\x00"


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def written(kind: type[io.TextIOWrapper], encoding: str) -> str:
    raw = io.BytesIO()
    out = AnswerStream(kind(raw, encoding=encoding, newline=""))
    out.write(ANSWER)
    out.end_line()
    return raw.getvalue().decode(encoding)


def test_a_terminal_is_not_controlled_by_an_answer():
    assert written(Terminal, "utf-8") == "␛]0;title␇␛[2J␍�1mone\ttwo␡\n日本␀\n"
    assert written(Terminal, "ascii") == "?]0;title??[2J??1mone\ttwo?\n???\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le"])
def test_a_file_gets_the_answer_as_it_is(encoding):
    expected = ANSWER.encode(encoding).decode(encoding)
    assert written(io.TextIOWrapper, encoding) == f"{expected}\n"
