"""What GGUF files leave unsaid of a vocabulary: ways of splitting, and what scores imply."""

from __future__ import annotations

import pytest
from gguf import GGUFWriter
from hardpoint_engine.text.sentence_pieces import implied_merges
from hardpoint_engine.text.splits import SPLITS
from hardpoint_engine.text.tokenizer import load_tokenizer


@pytest.mark.parametrize("pre", SPLITS)
def test_every_way_of_splitting_keeps_a_text(write_gguf, tables, pre):
    tokenizer = load_tokenizer(write_gguf(tables, pre=pre, add_bos_token=False))
    for text in ("It's 12345 o'clock;\r\n\n  naïve 日本語🙂\t", " ", "", "WE'LL  x=10"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_kept_together_as_the_name_says(write_gguf, tables):
    def pieces(pre):
        more = {"tokens": [*tables["tokens"], "12", "123"], "token_type": None}
        changes = more | {"merges": [*tables["merges"], "1 2", "12 3"], "add_bos_token": False}
        tokenizer = load_tokenizer(write_gguf(tables, pre=pre, **changes))
        return [tokenizer.decode([token]) for token in tokenizer.encode("123123")]

    assert pieces("llama-bpe") == ["123", "123"]
    assert pieces("qwen2") == pieces("smollm") == pieces("tekken") == [*"123123"]


def test_a_text_of_llama_3_begins_with_bos_unless_the_file_says_otherwise(write_gguf, tables):
    assert load_tokenizer(write_gguf(tables, pre="llama-bpe")).encode("cat")[0] == 1
    assert load_tokenizer(write_gguf(tables, pre="llama-bpe", add_bos_token=False)).encode("cat")[
        0
    ] not in (0, 1)
    assert load_tokenizer(write_gguf(tables, pre="qwen2")).encode("cat")[0] not in (0, 1)


def test_a_piece_without_merges_is_taken_whole_where_the_model_does(write_gguf, tables):
    more = {"tokens": [*tables["tokens"], "xyzzy"], "token_type": None, "add_bos_token": False}
    new = len(tables["tokens"])
    assert load_tokenizer(write_gguf(tables, pre="llama-bpe", **more)).encode("xyzzy") == (new,)
    assert new not in load_tokenizer(write_gguf(tables, pre="gpt-2", **more)).encode("xyzzy")


def test_merges_are_in_the_order_of_scores_and_long_left_parts_first():
    tokens = ["a", "b", "c", "bc", "ab", "abc", "zz"]
    scores = [0.0, 0.0, 0.0, -4.0, -3.0, -5.0, 0.0]
    assert implied_merges(tokens, scores) == [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")]
    assert implied_merges(tokens, None) == [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]


@pytest.fixture
def write_sentences(tmp_path):
    def write(architecture, tokens, scores):
        writer = GGUFWriter(tmp_path / "s.gguf", architecture)
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / "s.gguf"

    return write


def test_gemmas_pieces_are_joined_in_their_order(write_sentences):
    tokens, scores = ["a", "b", "c", "bc", "ab"], [0.0, 0.0, 0.0, -4.0, -3.0]
    assert load_tokenizer(write_sentences("gemma2", tokens, scores)).encode("abc") == (0, 3)
    tokens, scores = ["▁", *tokens], [0.0, *scores]
    assert load_tokenizer(write_sentences("llama", tokens, scores)).encode("abc") == (0, 5, 3)


def test_gemmas_blanks_are_spelt_as_in_other_pieces(write_sentences):
    tokens = ["a", "▁", "  ", "   ", "▁a"]
    tokenizer = load_tokenizer(write_sentences("gemma2", tokens, [0.0] * 5))
    assert tokenizer.encode("a  a") == (0, 2, 0)
    assert tokenizer.decode((0, 3, 4)) == "a    a"
