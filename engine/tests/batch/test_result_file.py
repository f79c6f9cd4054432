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


@pytest.mark.parametrize(
    "strange",
    [
        "hello",
        "{}",
        '{"line": 0, "digest": "0f"}',
        '{"line": "1", "digest": "0f"}',
        '{"line": 99999999999999, "digest": "0f"}',
        '{"line": 1, "digest": "x"}',
        '{"line": 1, "digest": 5}',
        "[" * 100_000,
    ],
)
def test_a_file_of_something_else_is_left_alone(tmp_path, strange):
    path = tmp_path / "out.jsonl"
    content = f'{strange}\n{{"line": 1, "digest": "0f"}}\n'
    path.write_text(content)
    with pytest.raises(InvalidRequestError, match="something else in its line 1; name another"):
        ResultFile(str(path))
    assert path.read_text() == content


def test_one_run_at_a_time_has_the_file(tmp_path):
    path = str(tmp_path / "out.jsonl")
    with ResultFile(path), pytest.raises(InvalidRequestError, match="written by another run"):
        ResultFile(path)
    ResultFile(path).close()


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(InvalidRequestError, match="cannot be written"):
        ResultFile(str(tmp_path / "none" / "out.jsonl"))
