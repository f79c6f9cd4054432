"""The file of prompts: read line by line, never as a whole. Driver side."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from attrs import fields, frozen
from hardpoint.errors import InvalidRequestError
from hardpoint.sampling_params import SamplingParams

LONGEST_LINE = 16 << 20
"""Bytes of one line; a longer one is malformed."""
JSON_LINES = (".jsonl", ".ndjson")
"""Endings of files that have a JSON object in each line. Any other file has a prompt in each."""
_LONGEST_ID = 20
"""Digits of a token id. Python reads no number of thousands."""
KEYS = ("id", "prompt", "messages", "sampling_params")


@frozen(kw_only=True)
class BatchLine:
    """One line that is not blank; ``number`` counts all lines from 1. ``text`` is None if it is
    longer than ``LONGEST_LINE``. ``digest`` tells it from another line.
    """

    number: int
    text: bytes | None
    digest: str


@frozen(kw_only=True)
class BatchPrompt:
    """What a line asks for: a ``prompt`` (text or token ids), or ``messages``."""

    prompt: str | list[int] | None
    messages: list[Mapping[str, Any]] | None
    sampling: SamplingParams


class PromptFile:
    """The lines of one regular file, which may be gone through several times."""

    def __init__(self, path: str, sampling: SamplingParams) -> None:
        self.path = Path(path)
        self._json = self.path.suffix.lower() in JSON_LINES
        self._sampling = {
            attribute.name: getattr(sampling, attribute.name)
            for attribute in fields(type(sampling))
        }
        if not self.path.is_file():
            raise InvalidRequestError(
                f"--batch-file {path} is not a file; give a text file with a prompt in each line, "
                "or a .jsonl file",
                field="batch_file",
                value=path,
            )

    def __iter__(self) -> Iterator[BatchLine]:
        with self.path.open("rb") as file:
            number = 0
            while True:
                raw, whole = _next_line(file)
                if not raw:
                    return
                number += 1
                text = raw.strip() if number > 1 else raw.removeprefix(b"\xef\xbb\xbf").strip()
                if text or not whole:
                    yield BatchLine(
                        number=number,
                        text=text if whole else None,
                        digest=hashlib.blake2b(text, digest_size=8).hexdigest(),
                    )

    def count_lines(self) -> int:
        """Return how many lines there are, blank ones too."""
        lines, last = 0, b""
        with self.path.open("rb") as file:
            while data := file.read(1 << 20):
                lines += data.count(b"\n")
                last = data
        return lines + bool(last and not last.endswith(b"\n"))

    def read(self, line: BatchLine) -> BatchPrompt:
        """Return what ``line`` asks for. Raises InvalidRequestError for a malformed one."""
        if line.text is None:
            raise _malformed(f"the line is longer than {LONGEST_LINE} bytes")
        try:
            text = line.text.decode()
        except UnicodeDecodeError as error:
            raise _malformed(f"the line is not UTF-8 at byte {error.start}") from None
        if not self._json:
            sampling = SamplingParams.from_mapping(self._sampling)
            return BatchPrompt(prompt=text, messages=None, sampling=sampling)
        return self._from_object(read_object(text))

    def _from_object(self, values: dict[str, Any]) -> BatchPrompt:
        for name in values:
            if name not in KEYS:
                raise _malformed(f"unknown key {name!r}; a line has {', '.join(KEYS)}")
        prompt, messages = values.get("prompt"), values.get("messages")
        if (prompt is None) == (messages is None):
            raise _malformed('a line has either "prompt" or "messages"')
        own = values.get("sampling_params", {})
        if not isinstance(own, dict):
            raise _malformed('"sampling_params" must be an object')
        if isinstance(bias := own.get("logit_bias"), dict):  # keys of JSON objects are texts
            own["logit_bias"] = {_number(key): value for key, value in bias.items()}
        sampling = SamplingParams.from_mapping({**self._sampling, **own})
        return BatchPrompt(prompt=prompt, messages=messages, sampling=sampling)

    def id_of(self, line: BatchLine) -> str | int | None:
        """Return the id that a line brings, as far as it can be read."""
        if not self._json or line.text is None:
            return None
        try:
            found = read_object(line.text.decode()).get("id")
        except (InvalidRequestError, UnicodeDecodeError):
            return None
        return found if isinstance(found, str | int) else None


def read_object(text: str) -> dict[str, Any]:
    """Return the JSON object of a line. Raises InvalidRequestError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _malformed(f"the line is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise _malformed("the line is not a JSON object")
    return found


def _next_line(file: BinaryIO) -> tuple[bytes, bool]:
    """Return the next line, and whether it is whole; of one that is too long, the beginning."""
    line = file.readline(LONGEST_LINE + 1)
    whole = len(line) <= LONGEST_LINE or line.endswith(b"\n")
    rest = line
    while not whole and rest and not rest.endswith(b"\n"):
        rest = file.readline(LONGEST_LINE)
    return line, whole


def _number(text: str) -> int | str:
    """Return ``text`` as a token id; as it is, to be refused by name, if it is none."""
    return int(text) if text.isdecimal() and len(text) <= _LONGEST_ID else text


def _malformed(why: str) -> InvalidRequestError:
    return InvalidRequestError(why, field="batch_file", value=None)
