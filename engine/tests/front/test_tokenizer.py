"""Vocabularies from files: equal to their source, and refused by name when they are not right."""

from __future__ import annotations

import json
import os

import pytest
from hardpoint.config.loading import load_config
from hardpoint.default_model import find_default_model
from hardpoint.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from hardpoint_engine.text.tokenizer import load_tokenizer, tokenizer_source
from hardpoint_engine.text.tokenizer_bytes import ByteTokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CORPUS = (
    "Hello, world! It's 10.5% of 1,234,567.",
    "naïve café — “quotes”, ﬁ, a\u0301 \u1e9b\u0323",
    "日本語のテキスト、中文字符\uff0c한국어 문장",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪 🤖 \U0010ffff",
    "def f(x):\n\treturn {'a': [x, 2, 3]}  # comment\n\n\nclass A:\n    pass\n",
    "\x00\x01\x07\x1b[31m\x7f\x80\u200b\ufeff\r\n\u2028\ufffd",
    "<|im_start|>user\nhi<|im_end|>\n<repo_name>x<file_sep>",
    "עברית العربية हिन्दी ไทย",
    "  leading and trailing   ",
    "\n\n\n",
    "the the the" * 50,
    "",
)


def test_the_default_model_keeps_digits_apart_as_its_file_asks():
    """``tokenizer.ggml.pre`` is smollm: the blanks before a digit are one piece of their own."""
    ours = load_tokenizer(find_default_model())

    def pieces(text):
        return [ours.decode([token]) for token in ours.encode(text)]

    assert pieces("2024") == ["2", "0", "2", "4"]
    assert pieces("a\n\n1.") == ["a", "\n\n", "1", "."]
    assert pieces("x =   1") == ["x", " =", "   ", "1"]


def test_a_folder_reads_back_what_was_saved(folder, trained):
    tokenizer = load_tokenizer(folder)
    for text in CORPUS:
        assert list(tokenizer.encode(text)) == trained.encode(text).ids
    assert tokenizer.vocab_size == trained.get_vocab_size()
    assert tokenizer.template_values == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    assert "message.role" in tokenizer.chat_template


def test_code_in_a_model_folder_is_never_run(folder, tmp_path):
    canary = tmp_path / "canary"
    code = f"open({str(canary)!r}, 'w').close()\nclass Evil: pass\n"
    for name in ("code.py", "tokenization_evil.py", "__init__.py", "sitecustomize.py"):
        (folder / name).write_text(code)
    settings = {
        "tokenizer_class": "Evil",
        "auto_map": {"AutoTokenizer": ["code.Evil", "code.Evil"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(folder).encode("cat")
    assert not canary.exists()


def test_a_template_file_wins_over_the_settings(folder):
    (folder / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer(folder).chat_template == "from the file"
    assert load_tokenizer(folder).tool_template is None
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    assert load_tokenizer(folder).chat_template == "from the file"
    assert load_tokenizer(folder).tool_template == "with tools"


def test_of_several_templates_the_default_one_and_that_for_tools_count(folder):
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "rag", "template": "no"},
        {"name": ["default"], "template": "no"},
        {"name": "default", "template": "yes"},
        "default",
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("yes", "tools")


def test_padding_and_truncation_saved_by_training_are_off(folder, trained):
    from tokenizers import Tokenizer

    other = Tokenizer.from_str(trained.to_str())
    other.enable_truncation(2)
    other.enable_padding(length=64)
    other.save(str(folder / "tokenizer.json"))
    assert list(load_tokenizer(folder).encode("the cat and")) == trained.encode("the cat and").ids


def test_gguf_tables_give_the_same_vocabulary(write_gguf, tables, trained):
    tokenizer = load_tokenizer(write_gguf(tables, template="t"))
    for text in (*CORPUS, "the<|start|>cat <|end|>"):
        assert list(tokenizer.encode(text)) == trained.encode(text).ids, repr(text)
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("t", None)
    assert tokenizer.template_values == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    assert tokenizer.decode([1, *tokenizer.encode("cat"), 0]) == "cat"
    assert tokenizer.decode([1, 0], skip_special_tokens=False) == "<|start|><|end|>"


def test_gguf_may_have_a_template_for_tools(write_gguf, tables):
    tokenizer = load_tokenizer(write_gguf(tables, template="t", tool_template="with tools"))
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("t", "with tools")


def test_gguf_says_what_stands_around_a_text(write_gguf, tables):
    path = write_gguf(tables, add_bos_token=True, add_eos_token=True)
    tokenizer = load_tokenizer(path)
    plain = tokenizer.encode("cat", add_special_tokens=False)
    assert tokenizer.encode("cat") == (1, *plain, 0)


def test_user_defined_tokens_are_matched_whole_but_shown(write_gguf, tables):
    types = list(tables["token_type"])
    types[0] = 4
    tokenizer = load_tokenizer(write_gguf(tables, token_type=types))
    assert tokenizer.encode("<|end|>") == (0,)
    assert tokenizer.decode([0]) == "<|end|>"


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": None}, CheckpointError, "holds no tokenizer"),
        ({"model": "bert"}, UnsupportedModelError, "'bert'; known here: gpt2, llama"),
        ({"pre": "viking"}, UnsupportedModelError, "'viking'; known here: default, gpt-2, phi-2"),
        ({"model": "llama", "merges": None}, CheckpointError, "scores is missing"),
        ({"model": "llama", "merges": None, "scores": [0.5]}, CheckpointError, "has 1 entries"),
        (
            {"model": "llama", "merges": None, "tokens": ["x" * 2000], "token_type": None},
            CheckpointError,
            "a piece of 2000 characters and 2000 in all; at most 256",
        ),
        ({"tokens": None}, CheckpointError, "tokenizer.ggml.tokens is missing"),
        ({"tokens": [1, 2]}, CheckpointError, "tokenizer.ggml.tokens must hold str"),
        ({"tokens": ["a", "a"]}, CheckpointError, "holds 'a' twice"),
        ({"merges": ["a b", "nopair"]}, CheckpointError, "'nopair', which is not two pieces"),
        ({"merges": ["zz yy"]}, CheckpointError, "contradict each other"),
        ({"token_type": [1]}, CheckpointError, "has 1 entries for"),
        ({"bos_token_id": 10**6}, CheckpointError, "bos_token_id is 1000000"),
        ({"add_bos_token": True, "bos_token_id": None}, CheckpointError, "no bos token"),
    ],
)
def test_wrong_gguf_tables_are_named(write_gguf, tables, changes, error, words):
    path = write_gguf(tables, **changes)
    with pytest.raises(error, match=words) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"model": {"type": "BPE", "vocab": {}, "merges": ["a"]}}'],
)
def test_a_broken_tokenizer_file_is_named(folder, content):
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(folder)


@pytest.mark.parametrize("content", ["{", "[" * 100_000, "[1]", "\udcff"])
def test_broken_tokenizer_settings_are_named(folder, content):
    path = folder / "tokenizer_config.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        load_tokenizer(folder)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_mutated_tokenizer_file_works_or_is_refused(folder, trained, data):
    """Whatever the library does with it, its panics included, nothing else gets out."""
    content = bytearray(trained.to_str().encode())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        length = data.draw(st.sampled_from([0, 1, 10, 1000]))
        content[start : start + length] = data.draw(st.binary(max_size=4))
    (folder / "tokenizer.json").write_bytes(content)
    try:
        tokenizer = load_tokenizer(folder)
        tokenizer.decode(tokenizer.encode("the cat <|end|> 🙂"))
    except CheckpointError:
        return


def test_what_the_library_panics_at_is_an_error(folder, trained):
    settings = json.loads(trained.to_str())
    settings["decoder"] = {"type": "Strip", "content": "x", "start": 5, "stop": 5}
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(folder)
    try:
        text = tokenizer.decode(tokenizer.encode("xxx"))
    except CheckpointError as error:
        assert "cannot join" in str(error)  # noqa: PT017 - either way is right
    else:
        assert isinstance(text, str)


def test_files_outside_the_folder_and_pipes_are_refused(folder, tmp_path):
    (folder / "tokenizer.json").rename(tmp_path / "elsewhere.json")
    (folder / "tokenizer.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(CheckpointError, match="outside the folder"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        load_tokenizer(folder)


def test_text_that_is_no_unicode_fails_alone(folder):
    for tokenizer in (load_tokenizer(folder), ByteTokenizer()):
        with pytest.raises(InvalidRequestError, match="position 1"):
            tokenizer.encode("a\udc80b")
        assert tokenizer.decode(tokenizer.encode("still well")) == "still well"


@settings(deadline=None)
@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert len(tokens) == len(text.encode())
    assert tokenizer.decode([*tokens, 256, -1]) == text


def source(**keys):
    return tokenizer_source(load_config(overrides=keys, environ={}))


def test_where_the_tokenizer_comes_from(folder, tmp_path):
    gguf = tmp_path / "m.gguf"
    gguf.touch()
    assert source(model=str(folder)) == folder
    assert source(model=str(gguf)) == gguf
    assert source(model=str(gguf), tokenizer=str(folder)) == folder
    assert source(model=str(tmp_path)) == gguf  # alone in its folder
    assert source(load_format="dummy") is None
    assert source(load_format="dummy", model="dummy") is None
    assert source(load_format="dummy", model=str(folder)) == folder


def test_a_missing_tokenizer_is_known_before_anything_is_loaded(folder, tmp_path):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json.*--tokenizer"):
        source(model=str(folder))
    with pytest.raises(CheckpointError, match="no such file"):
        source(model=str(folder), tokenizer=str(tmp_path / "nowhere"))
    (folder / "config.json").unlink()
    assert source(model=str(folder)) == folder  # no model at all is another error, told elsewhere


@pytest.mark.parametrize("key", ["model", "tokenizer"])
@pytest.mark.parametrize(
    ("path", "message"),
    [("x" * 10_000, "File name too long"), ("~nobody-of-that-name/model", "home directory")],
    ids=["long", "homeless"],
)
def test_a_path_that_the_system_refuses_is_named(key, path, message):
    with pytest.raises(CheckpointError, match=message):
        source(**{key: path})


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_a_tokenizer_of_another_kind_is_refused_by_name_with_the_way_out(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"\x0a\x0e")
    for keys in ({"model": str(tmp_path)}, {"tokenizer": str(tmp_path / name)}):
        with pytest.raises(CheckpointError, match=rf"{name}.* not read.*save_pretrained\(FOLDER\)"):
            source(**keys)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert source(model=str(tmp_path)) == tmp_path
