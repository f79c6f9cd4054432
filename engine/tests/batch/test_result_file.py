"""A file of results after every kind of end: nothing is lost, nothing is there twice."""

from __future__ import annotations

import json

import pytest
from hardpoint.errors import InvalidRequestError
from hardpoint_engine.batch.prompt_file import BatchLine
from hardpoint_engine.batch.result_file import ResultFile


def line(number: int, digest: str = "0f") -> BatchLine:
    return BatchLine(number=number, text=b"", digest=digest)


def numbers(path) -> list[int]:
    return [json.loads(text)["line"] for text in path.read_text().splitlines()]


def test_what_was_written_is_known_to_the_next_run(tmp_path):
    path = tmp_path / "out.jsonl"
    with ResultFile(str(path)) as results:
        results.write(line(3), {"outputs": ["🙂"]})
        results.write(line(1, "ffffffffffffffff"), {"error": {}})
        assert (results.done, results.failed) == (2, 1)
    with ResultFile(str(path)) as results:
        assert (results.done, results.failed) == (2, 1)
        assert results.has(line(3))
        assert results.has(line(1, "ffffffffffffffff"))
        assert not results.has(line(2))
        assert not results.has(line(4))
        with pytest.raises(InvalidRequestError, match="another line 3 than the prompts have now"):
            results.has(line(3, "ab"))


def test_a_run_that_is_cut_at_any_byte_is_gone_on_with(tmp_path):
    path = tmp_path / "out.jsonl"
    with ResultFile(str(path)) as results:
        for number in (2, 1, 3):
            results.write(line(number), {"outputs": [number]})
    whole = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        with ResultFile(str(path)) as results:
            kept = sum(end <= cut for end in ends)
            assert results.done == kept
            for number in (1, 2, 3):
                if not results.has(line(number)):
                    results.write(line(number), {"outputs": [number]})
        assert sorted(numbers(path)) == [1, 2, 3]


def test_a_last_line_of_zeros_is_cut_off(tmp_path):
    """As a file system may leave it after a power failure."""
    path = tmp_path / "out.jsonl"
    with ResultFile(str(path)) as results:
        results.write(line(1), {})
    path.write_bytes(path.read_bytes() + bytes(20) + b"\n")
    with ResultFile(str(path)) as results:
        assert results.done == 1
    assert numbers(path) == [1]


def test_a_first_line_that_is_cut_and_filled_with_zeros_is_cut_off(tmp_path):
    path = tmp_path / "out.jsonl"
    for left in (
        bytes(20),
        b'{"line": 1, "dig' + bytes(20),
        b'{"line": 1, "dig' + bytes(20) + b"\n",
    ):
        path.write_bytes(left)
        ResultFile(str(path)).close()
        assert path.read_bytes() == b""


BEGINNINGS = (b'{"line": 1, "digest": "x"}', b'{"line": 12')
"""Something else, unless they end without a line end: so a line of ours may begin."""


@pytest.mark.parametrize(
    "strange",
    [
        b"hello",
        b"{}",
        b'{"line": 0, "digest": "0f"}',
        b'{"line": "1", "digest": "0f"}',
        b'{"line": 99999999999999, "digest": "0f"}',
        b'{"line": 1, "digest": 5}',
        b"[" * 100_000,
        b"the only copy",
        b'{"name": "something else", "line": 1}',
        b'{"line": 1, "text": "a line of a poem"}',
        b'{"lines": [1]}',
        bytes(range(1, 256)),
        bytes(8) + b"binary" + bytes(8),
        b"\x7fELF\x02\x01\x01" + bytes(9),
        b"\n",
        *(beginning + b"\n" for beginning in BEGINNINGS),
    ],
)
@pytest.mark.parametrize("after", [b'\n{"line": 1, "digest": "0f"}\n', b"\n", b""])
def test_a_file_of_something_else_is_left_alone(tmp_path, strange, after):
    path = tmp_path / "out.jsonl"
    path.write_bytes(strange + after)
    with pytest.raises(InvalidRequestError, match="something else in its line 1; name another"):
        ResultFile(str(path))
    assert path.read_bytes() == strange + after


def test_one_run_at_a_time_has_the_file(tmp_path):
    path = str(tmp_path / "out.jsonl")
    with ResultFile(path), pytest.raises(InvalidRequestError, match="written by another run"):
        ResultFile(path)
    ResultFile(path).close()


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(InvalidRequestError, match="cannot be written"):
        ResultFile(str(tmp_path / "none" / "out.jsonl"))
