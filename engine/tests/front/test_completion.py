"""Ids from the engine become answers: text, stop strings, scores, ends."""

from __future__ import annotations

import pytest
from hardpoint.messages import Logprobs
from hardpoint.sampling_params import SamplingParams
from hardpoint_engine.completion import Completion, Generation, token_logprobs
from hardpoint_engine.request import EngineOutput
from hardpoint_engine.text.tokenizer_bytes import ByteTokenizer

TOKENIZER = ByteTokenizer()


def step(text: str | bytes, **more) -> EngineOutput:
    data = text.encode() if isinstance(text, str) else text
    return EngineOutput(req_id="0", new_tokens=tuple(data), **more)


def completion(**params) -> Completion:
    return Completion(0, SamplingParams(**{"max_tokens": 100, **params}), TOKENIZER)


def test_text_grows_by_whole_characters():
    one = completion()
    shown = []
    for byte in "é🙂".encode():
        one.add(step(bytes([byte])))
        shown.append(one.snapshot().text)
    assert shown == ["", "é", "é", "é", "é", "é🙂"]


def test_half_a_character_at_the_end_is_replaced():
    one = completion()
    one.add(step("🙂".encode()[:2], finish_reason="length"))
    assert one.snapshot().text == "\ufffd"
    assert one.snapshot().finish_reason == "length"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_it_wherever_it_is_cut(include):
    whole = "one two END three"
    for cuts in ([17], [8, 9], [9, 1, 7], [1] * 17):
        one, start, ended = completion(stop="END", include_stop=include), 0, False
        for cut in cuts:
            ended = one.add(step(whole[start : start + cut]))
            start += cut
            assert "E" not in one.snapshot().text or include
            if ended:
                break
        answer = one.snapshot()
        assert ended
        assert (answer.finish_reason, answer.stop_reason) == ("stop", "END")
        assert answer.text == ("one two END" if include else "one two ")
        assert bytes(answer.token_ids).decode() == "one two END"


def test_what_only_looked_like_a_stop_string_is_shown_at_the_end():
    one = completion(stop=["END", "xyz"])
    one.add(step("say EN"))
    assert one.snapshot().text == "say "
    one.add(step("", finish_reason="length"))
    assert one.snapshot().text == "say EN"


def test_stop_strings_count_beyond_min_tokens_only():
    one = completion(stop="a", min_tokens=3)
    assert not one.add(step("aaa"))
    assert not one.add(step("b"))
    assert one.add(step("a"))
    assert one.snapshot().text == "aaab"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_an_id_but_no_text(include):
    one = completion(stop_token_ids=[ord("!")], include_stop=include)
    assert not one.add(step("hi!", finish_reason="stop", stop_reason=ord("!")))
    answer = one.snapshot()
    assert answer.text == ("hi!" if include else "hi")
    assert answer.token_ids == list(b"hi!")
    assert answer.stop_reason == ord("!")


def test_without_detokenize_there_are_ids_only():
    one = completion(detokenize=False)
    one.add(step("hi", finish_reason="length"))
    assert (one.snapshot().text, one.snapshot().token_ids) == ("", list(b"hi"))


def test_snapshots_do_not_change():
    one = completion()
    one.add(step("a"))
    before = one.snapshot()
    one.add(step("b"))
    assert (before.text, before.token_ids) == ("a", [97])


def test_scores_are_by_token():
    for best, last in ((3, 4), (2, None)):
        rows = Logprobs(
            ids=((98, 97, 98, 99),),
            values=((-2.0, -1.0, -2.0, -3.0),),
            ranks=((2, 1, 2, 4)[: best + 1],),
            num_best=best,
        )
        scores = token_logprobs(rows, 0, TOKENIZER)
        assert list(scores) == [98, 97, 99]
        assert [(s.logprob, s.rank, s.decoded_token) for s in scores.values()] == [
            (-2.0, 2, "b"), (-1.0, 1, "a"), (-3.0, last, "c"),
        ]  # fmt: skip


def test_listed_tokens_have_scores_though_no_best_ones_are_asked_for():
    one = completion(logprob_token_ids=[99])
    rows = Logprobs(ids=((98, 99),), values=((-2.0, -3.0),), ranks=((2,),), num_best=0)
    one.add(step("b", logprobs=rows))
    (scores,) = one.snapshot().logprobs
    assert [(token, score.rank) for token, score in scores.items()] == [(98, 2), (99, None)]


def test_scores_stay_beside_their_tokens_when_a_stop_string_cuts():
    one = completion(stop="b", logprobs=0)
    rows = Logprobs(
        ids=((97,), (98,), (99,)),
        values=((-1.0,), (-2.0,), (-3.0,)),
        ranks=((1,), (1,), (1,)),
        num_best=0,
    )
    assert one.add(step("abc", logprobs=rows))
    answer = one.snapshot()
    assert answer.token_ids == [97, 98]
    assert [list(scores) for scores in answer.logprobs] == [[97], [98]]


def generation(**params) -> Generation:
    return Generation(
        request_id="r", prompt="p", prompt_token_ids=(1, 2),
        sampling=SamplingParams(**params), tokenizer=TOKENIZER,
    )  # fmt: skip


def test_a_request_is_finished_when_all_its_answers_are():
    one = generation(n=2)
    one.add(0, step("a", finish_reason="length"))
    assert not one.snapshot().finished
    one.add(1, step("b", finish_reason="stop"))
    result = one.snapshot()
    assert result.finished
    assert [answer.finish_reason for answer in result.outputs] == ["length", "stop"]
    assert (result.prompt, result.prompt_token_ids) == ("p", [1, 2])


def test_failing_keeps_what_was_finished_and_the_first_error():
    one = generation(n=2)
    one.add(0, step("a", finish_reason="length"))
    first, second = ValueError("first"), ValueError("second")
    one.fail(first)
    one.fail(second)
    result = one.snapshot()
    assert [answer.finish_reason for answer in result.outputs] == ["length", "error"]
    assert result.error is first


def test_scores_of_the_prompt_begin_with_its_second_token():
    one = generation(prompt_logprobs=0)
    rows = Logprobs(ids=((2,),), values=((-1.5,),), ranks=((1,),), num_best=0)
    one.add(0, step("", prompt_logprobs=rows))
    none, second = one.snapshot().prompt_logprobs
    assert none is None
    assert second[2].logprob == -1.5
