"""The default model's tokenizer beside that of transformers, from the same file.

Left out on purpose: two or more blanks or line ends before a digit. The file asks for digits apart
(``tokenizer.ggml.pre = smollm``), which transformers does not read; see
``test_the_default_model_keeps_digits_apart_as_its_file_asks``.
"""

from __future__ import annotations

import random
import re

import pytest

CORPUS = (
    "Hello, world! It's 10.5% of 1,234,567 -- isn't it?",
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
POOLS = ("abc XYZ'.,!?\n\t", "éüß中文🙂👍🏽\u200d\u0301", "0 1\x00\x1f\u2028\ufffd\U0010ffff")
BLANKS_BEFORE_A_DIGIT = re.compile(r"\s{2,}\d")


def random_texts(count: int) -> list[str]:
    draw = random.Random(0)
    texts = (
        "".join(draw.choice(draw.choice(POOLS)) for _ in range(draw.randrange(40)))
        for _ in range(count)
    )
    return [text for text in texts if not BLANKS_BEFORE_A_DIGIT.search(text)]


@pytest.fixture(scope="module")
def ours(model_path):
    from hardpoint_engine.text.tokenizer import load_tokenizer

    return load_tokenizer(model_path)


def test_texts_become_the_same_ids_and_ids_the_same_text(reference, ours):
    theirs = reference[1]
    texts = [*CORPUS, *random_texts(1000)]
    assert len(texts) > 900
    for text in texts:
        tokens = theirs(text).input_ids
        assert list(ours.encode(text)) == tokens, repr(text)
        for skip in (True, False):
            expected = theirs.decode(tokens, skip_special_tokens=skip)
            assert ours.decode(tokens, skip_special_tokens=skip) == expected
            detokenizer = ours.detokenizer(skip_special_tokens=skip)
            pieces = [detokenizer.add(token) for token in tokens]
            assert "".join([*pieces, detokenizer.finish()]) == expected
    assert ours.vocab_size == len(theirs)


def test_conversations_become_the_same_prompt(reference, ours):
    from hardpoint_engine.text.chat_template import ChatTemplate

    theirs = reference[1]
    conversations = (
        [{"role": "user", "content": "Say <hi> & 'bye' 🙂\n"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"},
         {"role": "assistant", "content": "So."}, {"role": "user", "content": "And?"}],
    )  # fmt: skip
    template = ChatTemplate(ours.chat_template, ours.template_values)
    try:
        for messages in conversations:
            for prompt in (True, False):
                expected = theirs.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=prompt
                )
                assert template.render(messages, add_generation_prompt=prompt) == expected
    finally:
        template.close()
