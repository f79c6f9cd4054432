"""A file of results after every kind of end: nothing is lost, nothing is there twice."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hardpoint.errors import InvalidRequestError
from hardpoint_engine.batch.prompt_file import BatchLine
from hardpoint_engine.batch.result_file import ResultFile


def line(number: int, digest: str = "0f") -> BatchLine:
    return BatchLine(number=number, text=b"", digest=digest)


def opened(path, run: str = "a-b-c", lines: int = 5) -> ResultFile:
    return ResultFile(str(path), run=run, lines=lines)


def numbers(path) -> list[int]:
    return [json.loads(text)["line"] for text in path.read_text().splitlines()]


def test_what_was_written_is_known_to_the_next_run(tmp_path):
    path = tmp_path / "out.jsonl"
    with opened(path) as results:
        results.write(line(3), {"outputs": ["🙂"]})
        results.write(line(1, "ffffffffffffffff"), {"error": {}})
        assert (results.done, results.failed) == (2, 1)
    with opened(path) as results:
        assert (results.done, results.failed) == (2, 1)
        assert results.has(line(3))
        assert results.has(line(1, "ffffffffffffffff"))
        assert not results.has(line(2))
        assert not results.has(line(4))
        with pytest.raises(InvalidRequestError, match="another line 3 than the prompts have now"):
            results.has(line(3, "ab"))


def test_a_run_that_is_cut_at_any_byte_is_gone_on_with(tmp_path):
    path = tmp_path / "out.jsonl"
    with opened(path) as results:
        for number in (2, 1, 3):
            results.write(line(number), {"outputs": [number]})
    whole = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        with opened(path) as results:
            kept = sum(end <= cut for end in ends)
            assert results.done == kept
            for number in (1, 2, 3):
                if not results.has(line(number)):
                    results.write(line(number), {"outputs": [number]})
        assert sorted(numbers(path)) == [1, 2, 3]


@pytest.mark.parametrize("known", [0, 2])
@pytest.mark.parametrize("content", [b"x", b"\0" * 1000 + b"x"], ids=["text", "zeros and text"])
def test_of_something_else_only_the_beginning_is_in_memory(tmp_path, known, content):
    """However long its only line is."""
    path = tmp_path / "out.jsonl"
    with opened(path) as results:
        for number in range(1, known + 1):
            results.write(line(number), {"outputs": []})
    with path.open("ab") as file:
        file.write(content)
        file.truncate(1 << 30)
    size = path.stat().st_size
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match=f"something else in its line {known + 1}"):
            opened(path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16 << 20
    assert path.stat().st_size == size


def test_a_last_line_of_zeros_is_cut_off(tmp_path):
    """As a file system may leave it after a power failure."""
    path = tmp_path / "out.jsonl"
    with opened(path) as results:
        results.write(line(1), {})
    path.write_bytes(path.read_bytes() + bytes(20) + b"\n")
    with opened(path) as results:
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
        opened(path).close()
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
        opened(path)
    assert path.read_bytes() == strange + after


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ("x-b-c", r"run that differs in model .*: go on as it was begun, or name another file"),
        ("a-x-c", "differs in sampling parameters or seed:"),
        ("a-x-x", "differs in sampling parameters or seed and system message"),
        ("x", "differs in model"),
    ],
)
def test_results_of_another_run_are_refused_and_left_alone(tmp_path, run, words):
    path = tmp_path / "out.jsonl"
    with opened(path) as results:
        results.write(line(1), {})
    content = path.read_bytes() + b'{"line": 2'
    path.write_bytes(content)
    with pytest.raises(InvalidRequestError, match=words):
        opened(path, run)
    assert path.read_bytes() == content


def test_a_result_of_a_line_that_the_prompts_do_not_have_is_refused(tmp_path):
    """Before anything of its size is made: there may be billions of lines."""
    path = tmp_path / "out.jsonl"
    content = '{"line": 4000000000, "digest": "0f", "run": "a-b-c"}\n'
    path.write_text(content)
    with pytest.raises(
        InvalidRequestError, match=r"line 4000000000, .* have 5 lines.*another file"
    ):
        opened(path)
    assert path.read_text() == content


def test_one_run_at_a_time_has_the_file(tmp_path):
    path = str(tmp_path / "out.jsonl")
    with opened(path), pytest.raises(InvalidRequestError, match="written by another run"):
        opened(path)
    opened(path).close()


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(InvalidRequestError, match="cannot be written"):
        opened(tmp_path / "none" / "out.jsonl")
