"""Small vocabularies as files: a Hugging Face folder and a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SPECIAL = ("<|end|>", "<|start|>")
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TEXTS = ["the cat and the dog 12 and 34", "naïve café", "日本語 🙂🙂", "x = 1\n    y = 2\n"] * 4


@pytest.fixture(scope="session")
def trained():
    """A byte-level BPE tokenizer of about 300 pieces."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
    return made


@pytest.fixture
def folder(trained, tmp_path) -> Path:
    """A model folder as far as its tokenizer goes."""
    path = tmp_path / "model"
    path.mkdir()
    trained.save(str(path / "tokenizer.json"))
    settings = {
        "bos_token": "<|start|>",
        "eos_token": {"content": "<|end|>", "special": True},
        "chat_template": TEMPLATE,
        "auto_map": {"AutoTokenizer": ["evil--code.Evil", None]},
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture(scope="session")
def tables(trained) -> dict[str, object]:
    """The same vocabulary as GGUF metadata (without ``tokenizer.ggml.``)."""
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "merges": [" ".join(pair) for pair in model["merges"]],
        "token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "bos_token_id": 1,
        "eos_token_id": 0,
    }


@pytest.fixture
def write_gguf(tmp_path):
    """Write tables, changed by ``changes``, as the metadata of a GGUF file without tensors."""
    from gguf import GGUFWriter

    def write(tables, template=None, tool_template=None, **changes) -> Path:
        path = tmp_path / "model.gguf"
        writer = GGUFWriter(path, "llama")
        for name, value in {**tables, **changes}.items():
            key = f"tokenizer.ggml.{name}"
            if value is None:
                continue
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        if template is not None:
            writer.add_string("tokenizer.chat_template", template)
        if tool_template is not None:
            writer.add_string("tokenizer.chat_template.tool_use", tool_template)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
