"""Pieces join to the whole, and none ends in half a character."""

from __future__ import annotations

import pytest
from hardpoint_engine.text.detokenizer import WindowDetokenizer
from hardpoint_engine.text.spelling import ALPHABET, piece_bytes
from hardpoint_engine.text.tokenizer_bytes import ByteTokenizer
from hardpoint_engine.text.vocabulary import Vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st

UNHURRIED = settings(deadline=None)
WORDS = ("naïve 🙂", "👩‍👩‍👧‍👦", "日本語", "\U0010ffff\x00", "plain", " é")


def pieces(detokenizer, ids):
    return [detokenizer.add(token) for token in ids] + [detokenizer.finish()]


def test_a_character_comes_when_it_is_whole():
    detokenizer = ByteTokenizer().detokenizer()
    assert pieces(detokenizer, "a🙂é".encode()) == ["a", "", "", "", "🙂", "", "é", ""]


def test_an_unfinished_character_is_replaced_at_the_end_only():
    detokenizer = ByteTokenizer().detokenizer()
    assert pieces(detokenizer, "🙂".encode()[:3]) == ["", "", "", "\ufffd"]


@UNHURRIED
@given(st.lists(st.integers(0, 255)))
def test_any_bytes_decode_as_a_whole_does(ids):
    tokenizer = ByteTokenizer()
    assert "".join(pieces(tokenizer.detokenizer(), ids)) == tokenizer.decode(ids)


@UNHURRIED
@given(st.lists(st.integers(0, 310)), st.booleans())
def test_any_ids_of_a_byte_level_vocabulary_decode_as_a_whole_does(trained, ids, skip):
    tokenizer = Vocabulary(trained)
    joined = "".join(pieces(tokenizer.detokenizer(skip_special_tokens=skip), ids))
    assert joined == trained.decode(ids, skip_special_tokens=skip)


@UNHURRIED
@given(st.text())
def test_no_piece_of_well_formed_text_has_a_broken_character(trained, text):
    tokenizer = Vocabulary(trained)
    found = pieces(tokenizer.detokenizer(skip_special_tokens=False), tokenizer.encode(text))
    assert "".join(found) == text
    assert sum(piece.count("\ufffd") for piece in found) == text.count("\ufffd")


def test_the_alphabet_is_the_librarys():
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(ALPHABET) == set(ByteLevel.alphabet())
    assert sorted(ALPHABET.values()) == list(range(256))
    assert piece_bytes("Ġa") == b" a"
    assert piece_bytes("<a b>") == b"<a b>"


BYTES = {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}


@pytest.fixture(scope="module")
def sentences():
    """A SentencePiece vocabulary: word pieces with a leading mark, and bytes."""
    from tokenizers import Tokenizer, decoders, models

    vocab = {"<unk>": 0, "▁the": 1, "▁cat": 2, "s": 3} | BYTES
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    made.add_special_tokens(["<unk>"])
    return made


def byte_ids(text: str) -> list[int]:
    return [4 + byte for byte in text.encode()]


WHOLE = st.lists(st.sampled_from([[0], [1], [2], [3], *map(byte_ids, WORDS)]))


@UNHURRIED
@given(WHOLE, st.booleans())
def test_sentence_pieces_decode_as_the_library_does(sentences, parts, skip):
    ids = [token for part in parts for token in part]
    tokenizer = Vocabulary(sentences)
    found = pieces(tokenizer.detokenizer(skip_special_tokens=skip), ids)
    expected = sentences.decode(ids, skip_special_tokens=skip)
    assert "".join(found) == tokenizer.decode(ids, skip_special_tokens=skip) == expected
    assert not any("\ufffd" in piece for piece in found)


@UNHURRIED
@given(st.lists(st.integers(0, 300)))
def test_any_sentence_pieces_decode_as_a_whole_does(sentences, ids):
    tokenizer = Vocabulary(sentences)
    assert "".join(pieces(tokenizer.detokenizer(), ids)) == tokenizer.decode(ids)


def test_bytes_that_are_no_character_are_replaced_one_by_one(sentences):
    """As in the library, where they stand alone; there, whole characters beside them go, too."""
    tokenizer = Vocabulary(sentences)
    half = byte_ids("日")[:2]
    for ids in ([*half], [1, *half], [*half, 1], [4 + 0xFF, 4 + 0xFE, 2]):
        assert tokenizer.decode(ids) == sentences.decode(ids), ids
    assert tokenizer.decode([*byte_ids("日"), *half]) == "日\ufffd\ufffd"


def test_the_bytes_of_pieces(sentences, trained):
    tokenizer = Vocabulary(sentences)
    assert [tokenizer.token_bytes(id_) for id_ in (1, 3, 4 + 0xE6, 999)] == [
        b" the", b"s", b"\xe6", b"",
    ]  # fmt: skip
    assert Vocabulary(trained).token_bytes(trained.token_to_id("Ġthe")) == b" the"


@pytest.fixture(scope="module")
def joining(sentences):
    """A vocabulary whose text depends on neighbours in a way that is not known here."""
    from tokenizers import Tokenizer, decoders

    made = Tokenizer.from_str(sentences.to_str())
    made.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    )
    return Vocabulary(made)


@UNHURRIED
@given(WHOLE)
def test_a_window_decodes_as_a_whole_does(joining, parts):
    ids = [token for part in parts for token in part]
    detokenizer = joining.detokenizer()
    assert isinstance(detokenizer, WindowDetokenizer)
    found = pieces(detokenizer, ids)
    assert "".join(found) == joining.decode(ids)
    assert not any("\ufffd" in piece for piece in found)


def test_a_hidden_id_does_not_cut_a_window(joining):
    ids = [1, 0, 2, 0, 0, 3]
    assert pieces(joining.detokenizer(), ids) == ["the", "", " cat", "", "", "s", ""]


def test_a_window_gives_up_on_bytes_that_never_become_a_character(joining):
    ids = [4 + 0xFF] * 12 + [1]
    found = pieces(joining.detokenizer(), ids)
    assert "".join(found).endswith(" the")
    assert any(found[:12])  # endless rubbish is not held back for ever
