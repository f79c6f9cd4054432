"""The file of results: one JSON object a line, in the order in which requests ended.

A run may be killed at any moment. What it wrote whole counts; a last line of its own that is not
whole is cut off by the next run, and nothing else ever is. One run at a time may have the file.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
from array import array
from collections.abc import Mapping
from types import TracebackType
from typing import Any, BinaryIO, Self

from hardpoint.errors import InvalidRequestError

from hardpoint_engine.batch.prompt_file import BatchLine
from hardpoint_engine.batch.run_identity import differing

NOT_YET, DONE, FAILED = 0, 1, 2


class ResultFile:
    """Knows which lines of the prompts are answered, and takes the answers of the others.

    ``run`` is what the results are computed with (:mod:`hardpoint_engine.batch.run_identity`),
    ``lines`` how many lines the prompts have. Raises InvalidRequestError if another run has the
    file, or if it holds what no run wrote, or one of something else.
    """

    def __init__(self, path: str, *, run: str, lines: int) -> None:
        self.path = path
        self._run = run
        self._lines = lines
        self._states = array("b")
        self._digests = array("Q")
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._refused(f"cannot be written: {error.strerror}") from None
        self._file = os.fdopen(handle, "r+b", buffering=0)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._take_in()
        except BlockingIOError:
            self._file.close()
            raise self._refused("is written by another run; wait for its end") from None
        except BaseException:
            self._file.close()
            raise

    @property
    def done(self) -> int:
        """How many lines are answered."""
        return len(self._states) - self._states.count(NOT_YET)

    @property
    def failed(self) -> int:
        """How many of those by an error."""
        return self._states.count(FAILED)

    def has(self, line: BatchLine) -> bool:
        """Whether ``line`` is answered. Raises InvalidRequestError if it was another line then."""
        if line.number >= len(self._states) or not self._states[line.number]:
            return False
        if self._digests[line.number] != int(line.digest, 16):
            raise self._refused(
                f"answers another line {line.number} than the prompts have now: their file was "
                "changed; name another file for the results"
            )
        return True

    def write(self, line: BatchLine, result: Mapping[str, Any]) -> None:
        """Add the result of ``line``."""
        entry = {"line": line.number, "digest": line.digest, "run": self._run, **result}
        data = memoryview(json.dumps(entry, ensure_ascii=False).encode(errors="replace") + b"\n")
        while data:
            data = data[os.write(self._file.fileno(), data) :]
        self._note(line.number, line.digest, failed="error" in result)

    def close(self) -> None:
        """Give the file to others."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _take_in(self) -> None:
        """Note what is there, and cut off a line that is not whole."""
        whole = 0
        with open(self._file.fileno(), "rb", closefd=False) as file:
            for number in itertools.count(1):
                text, begun = _next_line(file)
                if not text:
                    break
                entry = _entry(text) if text.endswith(b"\n") else None
                if entry is None:
                    if begun and _is_last(file) and (whole or _is_torn(text)):
                        break
                    raise self._refused(
                        f"holds something else in its line {number}; name another file"
                    )
                self._check(entry)
                self._note(entry["line"], entry["digest"], failed="error" in entry)
                whole += len(text)
        if whole < os.fstat(self._file.fileno()).st_size:
            os.truncate(self._file.fileno(), whole)

    def _check(self, entry: Mapping[str, Any]) -> None:
        """Refuse a result that is none of this run over these prompts."""
        if entry["run"] != self._run:
            raise self._refused(
                f"holds results of a run that differs in {differing(self._run, entry['run'])}: "
                "go on as it was begun, or name another file"
            )
        if entry["line"] > self._lines:
            raise self._refused(
                f"answers line {entry['line']}, and the prompts have {self._lines} lines: their "
                "file was changed; name another file for the results"
            )

    def _note(self, number: int, digest: str, *, failed: bool) -> None:
        missing = number + 1 - len(self._states)
        if missing > 0:
            self._states.extend([NOT_YET] * missing)
            self._digests.extend([0] * missing)
        self._states[number] = FAILED if failed else DONE
        self._digests[number] = int(digest, 16)

    def _refused(self, why: str) -> InvalidRequestError:
        return InvalidRequestError(f"--output {self.path} {why}", field="output", value=self.path)


MOST_LINES = 1 << 32
"""A number beyond this is no line's."""


def _entry(text: bytes) -> dict[str, Any] | None:
    """Return what a run wrote, None if it is something else."""
    try:
        entry = json.loads(text)
        number, digest = entry["line"], entry["digest"]
        right = 0 < number < MOST_LINES and 0 <= int(digest, 16) < 1 << 64
        right = right and isinstance(entry["run"], str)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return entry if right and isinstance(number, int) else None


_BEGINNING = b'{"line": '
"""Of every line that a run writes."""
_NUMBERED = re.compile(rb'\{"line": [1-9][0-9]{0,9}(?:|,.*)', re.DOTALL)
_SECOND_KEY = b', "digest": "'
HEAD = 64
"""Bytes of a line by which it is known."""


def _is_torn(text: bytes) -> bool:
    """Whether a first line is the beginning of one that a run wrote, zeros after it at most (as a
    file system may leave them after a power failure): there is nothing else in the file to go by.
    """
    text, zeros, rest = text.partition(b"\0")
    if text.endswith(b"\n") or rest.strip(b"\0\n"):
        return False
    if not text:
        return bool(zeros)
    if len(text) <= len(_BEGINNING):
        return _BEGINNING.startswith(text)
    if _NUMBERED.fullmatch(text) is None:
        return False
    _, comma, second = text.partition(b",")
    second = comma + second[: len(_SECOND_KEY) - 1]
    return _SECOND_KEY.startswith(second)


def _next_line(file: BinaryIO) -> tuple[bytes, bool]:
    """Return the next line, and whether a run may have begun it. Of one that none has, which may be
    of any length, only the beginning is read, and so of zeros.
    """
    text = file.readline(HEAD)
    if len(text) < HEAD or text.endswith(b"\n"):
        return text, True
    if _NUMBERED.fullmatch(text) is not None:
        return text + file.readline(), True
    rest = text
    while rest and not rest.strip(b"\0\n"):
        rest = file.read(1 << 20)
    return text, not rest


def _is_last(file: BinaryIO) -> bool:
    return not file.read(1)
