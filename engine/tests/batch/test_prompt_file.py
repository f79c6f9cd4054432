"""What a line of a file of prompts may be, and that the file is never read as a whole."""

from __future__ import annotations

import json

import pytest
from hardpoint.errors import InvalidRequestError
from hardpoint.sampling_params import SamplingParams
from hardpoint_engine.batch import prompt_file
from hardpoint_engine.batch.prompt_file import PromptFile

BASE = SamplingParams(temperature=0, max_tokens=7)


@pytest.fixture
def prompts(tmp_path):
    def make(data: bytes | str, name: str = "prompts.jsonl") -> PromptFile:
        path = tmp_path / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return PromptFile(str(path), BASE)

    return make


def test_a_text_file_has_a_prompt_in_each_line_that_is_not_blank(prompts):
    file = prompts(b'\xef\xbb\xbfone\n\n  \ntwo \xf0\x9f\x99\x82\r\n{"a": 1}', "prompts.txt")
    lines = list(file)
    assert [line.number for line in lines] == [1, 4, 5]
    assert [file.read(line).prompt for line in lines] == ["one", "two 🙂", '{"a": 1}']
    assert [file.id_of(line) for line in lines] == [None] * 3
    assert list(file) == lines  # and again
    assert len({line.digest for line in lines}) == 3


def test_a_json_line_may_bring_an_id_messages_and_its_own_parameters(prompts):
    file = prompts(
        '{"id": "a", "prompt": "x", "sampling_params": {"max_tokens": 3, "logit_bias": {"5": 1}}}\n'
        '{"id": 2, "messages": [{"role": "user", "content": "y"}]}\n'
        '{"prompt": [1, 2, 3]}\n'
    )
    lines = list(file)
    first, second, third = map(file.read, lines)
    assert (first.prompt, first.sampling.max_tokens, first.sampling.temperature) == ("x", 3, 0)
    assert first.sampling.logit_bias == {5: 1.0}
    assert second.messages == [{"role": "user", "content": "y"}]
    assert second.sampling == BASE
    assert third.prompt == [1, 2, 3]
    assert [file.id_of(line) for line in lines] == ["a", 2, None]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "not a JSON object"),
        ("{}", 'either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', 'either "prompt" or "messages"'),
        ('{"prompt": "a", "promt": 1}', "unknown key 'promt'; a line has id, prompt"),
        ('{"prompt": "a", "sampling_params": 1}', "must be an object"),
        ('{"prompt": "a", "sampling_params": {"max_token": 1}}', "did you mean: max_tokens"),
        ('{"prompt": "a", "sampling_params": {"temperature": 9}}', "temperature"),
        (
            '{"prompt": "a", "sampling_params": {"logit_bias": {"' + "1" * 4301 + '": 1}}}',
            "logit_bias must",
        ),
        ('{"prompt": "a", "sampling_params": {"seed": ' + "1" * 4301 + "}}", "is not JSON"),
        (b"\xff", "not UTF-8 at byte 0"),
    ],
)
def test_a_malformed_line_says_what_is_wrong(prompts, line, words):
    file = prompts(line)
    (only,) = file
    with pytest.raises(InvalidRequestError, match=words):
        file.read(only)
    assert file.id_of(only) is None


def test_a_line_that_is_too_long_is_passed_over_as_one(prompts, monkeypatch):
    monkeypatch.setattr(prompt_file, "LONGEST_LINE", 10)
    file = prompts(b"a" * 10 + b"\n" + b"b" * 35 + b"\n" + b"c" * 11, "prompts.txt")
    lines = list(file)
    assert [(line.number, line.text) for line in lines] == [(1, b"a" * 10), (2, None), (3, None)]
    with pytest.raises(InvalidRequestError, match="longer than 10 bytes"):
        file.read(lines[1])


def test_the_file_is_read_as_far_as_it_is_asked_for(prompts, tmp_path):
    file = prompts("x\n" * 100_000, "prompts.txt")
    lines = iter(file)
    assert next(lines).number == 1
    with (tmp_path / "prompts.txt").open("r+b") as changed:  # what is not read yet may change
        changed.seek(199_998)
        changed.write(b"y\n")
    *_, last = lines
    assert (last.number, last.text) == (100_000, b"y")


@pytest.mark.parametrize(("data", "count"), [("", 0), ("a", 1), ("a\n", 1), ("\n\na", 3)])
def test_lines_are_counted_blank_ones_too(prompts, data, count):
    assert prompts(data).count_lines() == count


def test_what_is_no_file_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(InvalidRequestError, match="is not a file"):
            PromptFile(str(path), BASE)


def test_ids_that_are_no_ids_are_left_out(prompts):
    file = prompts(json.dumps({"id": [1], "prompt": "a"}))
    (only,) = file
    assert file.id_of(only) is None
