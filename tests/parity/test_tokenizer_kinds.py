"""Every kind of tokenizer that is read, small and made here, beside transformers and the library
that it was trained with: the same ids, the same text, and pieces of it that join.
"""

from __future__ import annotations

import codecs
import json
import random
import unicodedata
from pathlib import Path

import pytest
from tokenizers.decoders import DecodeStream

CORPUS = (
    "Hello, world! It's 10.5% of 1,234,567 -- isn't it? WE'LL see.",
    "naïve café — “quotes”, ﬁ, a\u0301 \u1e9b\u0323",
    "日本語のテキスト、中文字符\uff0c한국어 문장",
    "👩\u200d👩\u200d👧\u200d👦 👍🏽 🇩🇪 🤖 \U0010ffff",
    "def f(x):\n\treturn {'a': [x, 2, 3]}  # comment\r\n\r\n\nclass A:\n    pass\n",
    "\x00\x01\x07\x1b[31m\x7f\x80\u200b\ufeff\r\n\u2028\ufffd",
    "<s>user\nhi</s>\n<unk>x<0x0A> ▁▁ <extra>",
    "עברית العربية हिन्दी ไทย",
    "  leading and trailing   ",
    " " * 70 + "x" + "\t" * 9,
    "\n\n\n",
    "the the the" * 20,
    "a",
    " ",
    "",
)
POOLS = ("abc XYZ'.,!?\n\t", "éüß中文🙂👍🏽\u200d\u0301", "0 1  \x00\x1f\u2028\ufffd\U0010ffff")
TRAINING = [text.replace("\x00", "") for text in CORPUS if text.strip()] * 2
SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def texts(count: int = 150) -> list[str]:
    draw = random.Random(1)
    return [*CORPUS] + [
        "".join(draw.choice(draw.choice(POOLS)) for _ in range(draw.randrange(30)))
        for _ in range(count)
    ]


def compare(ours, theirs, *, composed: bool = False) -> None:
    """``theirs`` is a transformers tokenizer."""
    every = texts()
    if composed:
        every = [unicodedata.normalize("NFC", text) for text in every]
    for text in every:
        expected = theirs(text).input_ids
        assert list(ours.encode(text)) == expected, repr(text)
        plain = theirs(text, add_special_tokens=False).input_ids
        assert list(ours.encode(text, add_special_tokens=False)) == plain, repr(text)
        for skip in (True, False):
            whole = theirs.decode(expected, skip_special_tokens=skip)
            assert ours.decode(expected, skip_special_tokens=skip) == whole, repr(text)
            detokenizer = ours.detokenizer(skip_special_tokens=skip)
            stream, given, streamed = DecodeStream(skip_special_tokens=skip), "", ""
            for token in expected:
                given += detokenizer.add(token)
                streamed += stream.step(theirs.backend_tokenizer, token) or ""
                assert given.startswith(streamed), repr(text)  # none of it comes later
            assert given + detokenizer.finish() == whole, repr(text)


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def broken(tokenizer, count: int = 300) -> list[list[int]]:
    """Ids cut anywhere, within characters too: beginnings and middles of texts, and ids that no
    text gives.
    """
    draw = random.Random(2)
    found = []
    for text in CORPUS:
        ids = list(tokenizer.encode(text))
        found += [ids[:end] for end in range(min(len(ids), 40))]
        found += [ids[start : start + 12] for start in range(min(len(ids), 30))]
    size = range(tokenizer.vocab_size)
    return found + [draw.choices(size, k=draw.randrange(1, 12)) for _ in range(count)]


def compare_broken(ours, theirs, expected_of=None) -> None:
    """As a whole and piece by piece; what was given out never changes."""
    for ids in broken(ours):
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            if expected_of is not None:
                assert expected_of(theirs, ids, skip, whole_runs=True) == expected, ids
                expected = expected_of(theirs, ids, skip, whole_runs=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected, ids
            detokenizer = ours.detokenizer(skip_special_tokens=skip)
            given = ""
            for token in ids:
                given += detokenizer.add(token)
                assert expected.startswith(given), ids
            assert given + detokenizer.finish() == expected, ids


def sentence_text(theirs, ids, skip, *, whole_runs) -> str:
    """The text of SentencePiece ids. A run of byte tokens that is no UTF-8 becomes U+FFFD byte for
    byte: all of it in the library (``whole_runs``), and here what is no character.
    """
    special = {each for each, token in theirs.added_tokens_decoder.items() if token.special}
    shown = [each for each in ids if not (skip and each in special)]
    pieces = theirs.convert_ids_to_tokens(shown)
    text, run = "", b""
    for piece in [*pieces, ""]:
        if piece in BYTES:
            run += bytes([BYTES.index(piece)])
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += REPLACEMENT * len(run) if whole_runs else run.decode(errors="each")
        text, run = text + piece.replace("▁", " "), b""
    stripped = '"Strip"' in theirs.backend_tokenizer.decoder.__getstate__().decode()
    return text.removeprefix(" ") if stripped else text


codecs.register_error("each", lambda error: (REPLACEMENT * (error.end - error.start), error.end))


def load(path: Path):
    from hardpoint_engine.text.tokenizer import load_tokenizer

    return load_tokenizer(path)


@pytest.fixture(scope="module")
def byte_level():
    """(tokens, merges) of a byte-level vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(TRAINING, trainer)
    model = json.loads(made.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [" ".join(pair) for pair in model["merges"]]


def train(folder: Path, **settings):
    """Train a SentencePiece model; its processor."""
    import sentencepiece

    (folder / "corpus.txt").write_text("\n".join(" ".join(TRAINING).split("\n")) * 3)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"), model_prefix=str(folder / "m"), model_type="bpe",
        vocab_size=470, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, character_coverage=0.98, minloglevel=2,
        user_defined_symbols=["<extra>"], num_threads=1, **settings,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    return train(tmp_path_factory.mktemp("sentences"))


def sentence_tables(processor) -> dict[str, object]:
    size = range(processor.get_piece_size())
    kinds = [
        2 if processor.is_unknown(i)
        else 3 if processor.is_control(i)
        else 6 if processor.is_byte(i)
        else 4 if processor.id_to_piece(i) == "<extra>"
        else 1
        for i in size
    ]  # fmt: skip
    return {
        "model": "llama",
        "tokens": [processor.id_to_piece(i) for i in size],
        "scores": [processor.get_score(i) for i in size],
        "token_type": kinds,
        "bos_token_id": processor.bos_id(),
        "eos_token_id": processor.eos_id(),
        "unknown_token_id": processor.unk_id(),
    }


def write_gguf(path: Path, architecture: str, tables) -> Path:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, architecture)
    for name, value in tables.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def theirs_of(path: Path):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_byte_level_out_of_gguf(tmp_path, byte_level, pre):
    tokens, merges = byte_level
    tables = {
        "model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges,
        "token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "bos_token_id": 1, "eos_token_id": 2, "add_bos_token": pre == "llama-bpe",
    }  # fmt: skip
    path = write_gguf(tmp_path / "m.gguf", "llama", tables)
    compare(load(path), theirs_of(path), composed=pre == "qwen2")
    compare_broken(load(path), theirs_of(path))


def test_qwen_texts_are_composed_as_its_own_tokenizer_does(tmp_path, byte_level):
    from transformers import Qwen2Tokenizer

    tokens, merges = byte_level
    tables = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "merges": merges}
    ours = load(write_gguf(tmp_path / "m.gguf", "qwen2", tables))
    theirs = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[tuple(line.split(" ")) for line in merges],
    )
    for text in ("a\u0301 cafe\u0301", *CORPUS):
        assert list(ours.encode(text)) == theirs(text).input_ids, repr(text)


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma2"])
def test_sentence_pieces_out_of_gguf(tmp_path, sentences, architecture):
    tables = sentence_tables(sentences)
    path = write_gguf(tmp_path / "m.gguf", architecture, tables)
    compare(load(path), theirs_of(path))
    compare_broken(load(path), theirs_of(path), sentence_text)


@pytest.mark.parametrize("space", [True, False])
def test_sentence_pieces_are_those_of_the_library(tmp_path, sentences, space):
    """Texts without special tokens: SentencePiece itself gives them no meaning in a text. That no
    space is to be put before a text, transformers does not read.
    """
    theirs = sentences if space else train(tmp_path, add_dummy_prefix=False)
    tables = sentence_tables(theirs) | {"add_space_prefix": space, "add_bos_token": False}
    ours = load(write_gguf(tmp_path / "m.gguf", "phi3", tables))
    for text in texts():
        if "<" in text or "\x00" in text or not text:
            continue
        expected = theirs.encode(text)
        assert list(ours.encode(text)) == expected, repr(text)
        assert ours.decode(expected) == theirs.decode(expected), repr(text)


def styled(tokenizer, style: str) -> None:
    from tokenizers import decoders, normalizers, pre_tokenizers

    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if style == "gemma":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif style == "prepended":  # Llama 2, Phi-3
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        parts.append(decoders.Strip(" ", 1, 0))
    elif style == "metaspace":  # Mistral
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(parts)


@pytest.mark.parametrize("style", ["prepended", "metaspace", "gemma"])
def test_sentence_pieces_out_of_json(tmp_path, sentences, style):
    from hardpoint_engine.text.sentence_pieces import implied_merges
    from tokenizers import Tokenizer, models

    tables = sentence_tables(sentences)
    tokens = tables["tokens"]
    made = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=implied_merges(tokens, tables["scores"]),
            unk_token="<unk>", fuse_unk=True, byte_fallback=True,
        )
    )  # fmt: skip
    styled(made, style)
    made.add_special_tokens(list(SPECIAL))
    compare_json(tmp_path, made, sentence_text)


def test_unigram_out_of_json(tmp_path):
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=list(SPECIAL), unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(TRAINING, trainer)
    compare_json(tmp_path, made)


def test_byte_level_out_of_json(tmp_path, byte_level):
    from hardpoint_engine.text.splits import SPLITS
    from tokenizers import Tokenizer, decoders, models

    tokens, merges = byte_level
    made = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(line.split(" ")) for line in merges],
            ignore_merges=True,
        )
    )
    SPLITS["llama-bpe"].apply(made)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    compare_json(tmp_path, made)


def compare_json(folder: Path, made, expected_of=None) -> None:
    from transformers import PreTrainedTokenizerFast

    made.save(str(folder / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ours = load(folder)
    compare(ours, theirs)
    compare_broken(ours, theirs, expected_of)
    assert ours.vocab_size == len(theirs)
