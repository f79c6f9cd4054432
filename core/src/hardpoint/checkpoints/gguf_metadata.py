"""The key-value part of a GGUF header: scalars read at once, arrays when they are asked for.

Format: the GGUF specification, version 3 (little-endian; a string is a 64-bit length and UTF-8).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from itertools import repeat
from mmap import mmap
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from attrs import frozen

from hardpoint.checkpoints.tables import shown
from hardpoint.errors import CheckpointError

STRING, ARRAY = 8, 9
SCALARS: Final = MappingProxyType(
    {
        number: struct.Struct("<" + code)
        for number, code in (
            (0, "B"), (1, "b"), (2, "H"), (3, "h"), (4, "I"), (5, "i"), (6, "f"),
            (7, "?"), (10, "Q"), (11, "q"), (12, "d"),
        )
    }
)  # fmt: skip
BOOLEAN: Final = 7
LONGEST_STRING: Final = 16 << 20  # a chat template is some kilobytes
DEEPEST_ARRAY: Final = 4
UNSIGNED_64: Final = struct.Struct("<Q")


@frozen(kw_only=True)
class PackedArray:
    """An array that was skipped: where its items begin and end, their type number and count."""

    type: int
    count: int
    begin: int
    end: int


class Cursor:
    """Reads a header front to back. Whatever it is asked, it stays inside the file.

    Every failure is a CheckpointError with the file and what was being read (``what``).
    """

    def __init__(self, path: Path, buffer: mmap, position: int = 0) -> None:
        self.path = path
        self.buffer = buffer
        self.position = position
        self.what = "the header"

    def fail(self, problem: str) -> CheckpointError:
        """Make the error for a problem at this place."""
        return CheckpointError(
            f"{self.path}: {self.what} is corrupt at byte {self.position}: {problem}; fetch the "
            f"file again"
        )

    def need(self, num_bytes: int) -> None:
        """Raise unless so many bytes are left."""
        left = len(self.buffer) - self.position
        if num_bytes > left:
            raise self.fail(f"{num_bytes} bytes are needed and the file has {left} more")

    def scalar(self, form: struct.Struct) -> Any:
        """Read one number."""
        self.need(form.size)
        (value,) = form.unpack_from(self.buffer, self.position)
        self.position += form.size
        return value

    def number(self, type: int) -> Any:
        """Read one number of a GGUF value type; a boolean must be 0 or 1."""
        form = SCALARS.get(type)
        if form is None:
            raise self.fail(f"there is no value type {type}")
        if type == BOOLEAN:
            self.need(1)
            if self.buffer[self.position] > 1:
                raise self.fail(f"{self.buffer[self.position]} is not a boolean")
        return self.scalar(form)

    def string(self, limit: int = LONGEST_STRING) -> str:
        """Read a string of at most ``limit`` bytes."""
        length = self.scalar(UNSIGNED_64)
        if length > limit:
            raise self.fail(f"a string of {length} bytes, where at most {limit} are accepted")
        self.need(length)
        raw = self.buffer[self.position : self.position + length]
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail("a string is not UTF-8") from error
        self.position += length
        return text

    def array(self, depth: int = 1) -> PackedArray:
        """Skip an array without building it."""
        item, count = self.scalar(SCALARS[4]), self.scalar(UNSIGNED_64)
        begin = self.position
        if item in SCALARS:
            self.need(count * SCALARS[item].size)
            self.position += count * SCALARS[item].size
        elif item == STRING:
            self.skip_strings(count)
        elif item != ARRAY:
            raise self.fail(f"there is no value type {item}")
        elif depth == DEEPEST_ARRAY:
            raise self.fail(f"arrays are nested deeper than {DEEPEST_ARRAY}")
        else:
            self.need(count * (4 + 8))
            for _ in repeat(None, count):
                self.array(depth + 1)
        return PackedArray(type=item, count=count, begin=begin, end=self.position)

    def skip_strings(self, count: int) -> None:
        """Step over ``count`` strings.

        Each length says where the next one stands, so all must be visited: about 100,000 in a
        tokenizer. This loop is the whole cost of opening a file, so the bounds are left to
        ``unpack_from``, which refuses to read past the end.
        """
        self.need(count * UNSIGNED_64.size)
        buffer, position, unpack = self.buffer, self.position, UNSIGNED_64.unpack_from
        try:
            for _ in repeat(None, count):
                position += 8 + unpack(buffer, position)[0]
        except (struct.error, OverflowError) as error:
            raise self.fail("the strings of an array run over the end of the file") from error
        self.need(position - self.position)
        self.position = position

    def items(self, array: PackedArray) -> tuple[Any, ...]:
        """Build the items of an array that was skipped before."""
        self.position = array.begin
        if array.type == STRING:
            items: tuple[Any, ...] = self._strings(array.count)
        elif array.type == ARRAY:
            items = tuple(self.items(self.array()) for _ in repeat(None, array.count))
        elif array.type == BOOLEAN:
            items = tuple(self.number(BOOLEAN) for _ in repeat(None, array.count))
        else:
            code = SCALARS[array.type].format.lstrip("<")
            items = struct.unpack_from(f"<{array.count}{code}", self.buffer, array.begin)
        self.position = array.end
        return items

    def _strings(self, count: int) -> tuple[str, ...]:
        buffer, position, unpack = self.buffer, self.position, UNSIGNED_64.unpack_from
        texts: list[str] = []
        try:
            for _ in repeat(None, count):
                begin = position + 8
                position = begin + unpack(buffer, position)[0]
                texts.append(buffer[begin:position].decode())
        except UnicodeDecodeError as error:
            self.position = position
            raise self.fail(f"string {len(texts)} of the array is not UTF-8") from error
        return tuple(texts)


class Metadata(Mapping[str, Any]):
    """The keys of a GGUF file. A scalar is its value; an array becomes a tuple at first use."""

    def __init__(self, path: Path, buffer: mmap, values: Mapping[str, Any]) -> None:
        self._path = path
        self._buffer = buffer
        self._values = dict(values)

    def __getitem__(self, key: str) -> Any:
        """Return a value; KeyError if absent, CheckpointError if an array does not decode."""
        value = self._values[key]
        if isinstance(value, PackedArray):
            cursor = Cursor(self._path, self._buffer, value.begin)
            cursor.what = f"metadata key {shown(key)}"
            value = self._values[key] = cursor.items(value)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def count(self, key: str) -> int | None:
        """Return how many items an array has, without building it; None if it is no array."""
        value = self._values.get(key)
        if isinstance(value, PackedArray):
            return value.count
        return len(value) if isinstance(value, tuple) else None
