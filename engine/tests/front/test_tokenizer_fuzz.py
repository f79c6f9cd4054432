"""Vocabularies that lie: whatever is in the files, only the error of checkpoints comes out, or a
tokenizer that works.
"""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path

import pytest
from hardpoint.errors import CheckpointError
from hardpoint_engine.text.tokenizer import load_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FUZZ = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
MOST_MEMORY = 8 << 20
SAMPLES = ("", "a b  ab", "▁<s>ü🙂\x00\n", "<0x41>")
PIECES = ["<unk>", "<s>", "a", "b", "ab", "▁", "▁a", "Ġ", "Ġa", "<0x41>", "", " ", "\n", "🙂", "é"]
KEYS = (
    "model", "pre", "tokens", "scores", "token_type", "merges", "bos_token_id", "eos_token_id",
    "unknown_token_id", "add_bos_token", "add_eos_token", "add_space_prefix",
)  # fmt: skip


def packed(value: object) -> bytes:
    """A metadata value with its type number before it; a list takes the type of its first item."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<Iq", 11, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        raw = value.encode(errors="replace")
        return struct.pack("<IQ", 8, len(raw)) + raw
    items = [packed(item) for item in value]
    kind = items[0][:4] if items else struct.pack("<I", 4)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(
        item[4:] for item in items
    )  # fmt: skip


def write_gguf(path: Path, metadata: dict[str, object]) -> None:
    body = b""
    for key, value in metadata.items():
        body += struct.pack("<Q", len(key)) + key.encode() + packed(value)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(metadata)) + body)


def attempt(path: Path, seen: dict[str, int]) -> None:
    tracemalloc.start()
    try:
        tokenizer = load_tokenizer(path)
        for text in SAMPLES:
            ids = tokenizer.encode(text)
            tokenizer.decode(ids)
            detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
            "".join(map(detokenizer.add, ids)) + detokenizer.finish()
        seen["accepted"] += 1
    except CheckpointError:
        seen["refused"] += 1
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MOST_MEMORY


NUMBERS = st.one_of(st.integers(-3, 20), st.sampled_from([-(1 << 63), (1 << 63) - 1, 1 << 32]))
SCALARS = st.one_of(
    NUMBERS, st.booleans(), st.floats(width=32), st.text(max_size=6), st.sampled_from(PIECES)
)
LISTS = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=14),
    st.lists(st.sampled_from(["a b", "▁ a", "Ġ a", "a", "a b c", " ", ""]), max_size=4),
    st.lists(st.floats(width=32), max_size=14),
    st.lists(NUMBERS, max_size=14),
)
BASE = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "a", "b", "ab", "▁", "▁a", "<0x41>", "Ġ"],
    "scores": [0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0, 0.0, -6.0],
    "token_type": [2, 3, 1, 1, 1, 1, 4, 6, 1],
    "bos_token_id": 1,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_gguf_metadata(place, kind):
    seen = {"accepted": 0, "refused": 0}
    path = place / "m.gguf"
    base = BASE | {"model": kind} | ({"merges": ["a b"]} if kind == "gpt2" else {})

    def write(changes, architecture="llama"):
        metadata = {f"tokenizer.ggml.{key}": value for key, value in {**base, **changes}.items()}
        write_gguf(path, {"general.architecture": architecture} | metadata)

    write({})
    attempt(path, seen)
    assert seen["accepted"] == 1

    @FUZZ
    @given(
        st.dictionaries(st.sampled_from(KEYS), SCALARS | LISTS, max_size=3),
        st.sampled_from(["llama", "phi3", "gemma2"]),
    )
    def run(changes, architecture):
        write(changes, architecture)
        attempt(path, seen)

    run()
    assert seen["accepted"] > 10
    assert seen["refused"] > 30


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=4), st.just([]), st.just({})),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


def places(value, at=()):
    """Every path into a document."""
    yield at
    items = ()
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield from places(inner, (*at, key))


def test_json_documents(place, trained):
    """One value of the document, wherever it is, replaced by another."""
    seen = {"accepted": 0, "refused": 0}
    path = place / "tokenizer.json"
    source = json.loads(trained.to_str())
    source["model"]["merges"] = source["model"]["merges"][:2]
    kept = {piece for pair in source["model"]["merges"] for piece in (*pair, "".join(pair))}
    vocabulary = [*list(source["model"]["vocab"])[:20], *kept]
    source["model"]["vocab"] = {piece: index for index, piece in enumerate(vocabulary)}
    every = [at for at in places(source) if at]

    @FUZZ
    @given(st.sampled_from(every), VALUES)
    def run(at, value):
        document = json.loads(json.dumps(source))
        inner = document
        for key in at[:-1]:
            inner = inner[key]
        inner[at[-1]] = value
        path.write_text(json.dumps(document))
        attempt(path, seen)

    run()
    assert seen["refused"] > 30


def test_json_bytes(place, trained):
    seen = {"accepted": 0, "refused": 0}
    path = place / "tokenizer.json"
    raw = trained.to_str().encode()

    @FUZZ
    @given(st.integers(0, len(raw) - 1), st.binary(max_size=3), st.integers(0, 5))
    def run(at, put, gone):
        path.write_bytes(raw[:at] + put + raw[at + gone :])
        attempt(path, seen)

    run()
    assert seen["refused"] > 30


def test_parts_that_would_blow_up_texts_are_refused(place, trained):
    from tokenizers import Tokenizer, normalizers, processors

    path = place / "tokenizer.json"
    for part, made in (
        ("normalizer", normalizers.Replace("a", "b" * 5000)),
        ("normalizer", normalizers.Sequence([normalizers.Prepend("b" * 5000)])),
        (
            "post_processor",
            processors.TemplateProcessing(
                single=["$A", *["<|start|>"] * 5000], special_tokens=[("<|start|>", 1)]
            ),
        ),
    ):
        tokenizer = Tokenizer.from_str(trained.to_str())
        setattr(tokenizer, part, made)
        tokenizer.save(str(path))
        with pytest.raises(CheckpointError, match=f"its {part} holds 50.. characters"):
            load_tokenizer(path)


def test_deep_documents_are_refused(place):
    for name, document in (
        ("tokenizer.json", '{"normalizer":' + "[" * 200_000),
        (
            "tokenizer.json",
            '{"normalizer":' + '{"type":"Sequence","normalizers":[' * 50_000 + "]}" * 50_000 + "}",
        ),
    ):
        path = place / name
        path.write_text(document)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
            load_tokenizer(path)


def test_a_pattern_that_never_ends_is_given_up(place, trained):
    """The library gives up on a match after ten million steps, about a second."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    made = Tokenizer.from_str(trained.to_str())
    made.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")
    made.save(str(place / "tokenizer.json"))
    tokenizer = load_tokenizer(place / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"cannot split this text: .*retry-limit"):
        tokenizer.encode("a" * 40)
