"""The reference: transformers, loading the same file, in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics say that",
    "Water boils at",
    "In 1969, the first humans",
    "A haiku about autumn leaves:\n",
    (
        "Read this with care before you answer. A train leaves the station at nine in the morning "
        "and travels east at sixty miles an hour; a second train leaves an hour later. The second"
    ),
)
NEW_TOKENS = 64


@pytest.fixture(scope="session")
def model_path() -> Path:
    from hardpoint.default_model import find_default_model

    return Path(find_default_model())


@pytest.fixture(scope="session")
def reference(model_path):
    """(model, tokenizer) of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": model_path.name}
    model = AutoModelForCausalLM.from_pretrained(model_path.parent, dtype=torch.float32, **source)
    return model.eval(), AutoTokenizer.from_pretrained(model_path.parent, **source)


@pytest.fixture(scope="session")
def prompt_ids(reference) -> list[list[int]]:
    return [reference[1](text).input_ids for text in PROMPTS]


@pytest.fixture(scope="session")
def expected(reference, prompt_ids) -> list[tuple[list[int], list[float]]]:
    """Per prompt: the greedy ids, and at each the gap between the two best logits."""
    import torch

    found = []
    model = reference[0]
    model.generation_config.eos_token_id = None  # go on after an end token, as ignore_eos does
    for ids in prompt_ids:
        tokens = torch.tensor([ids])
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            pad_token_id=0,
            max_new_tokens=NEW_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack([step[0] for step in out.logits]).topk(2).values
        gaps = (best[:, 0] - best[:, 1]).tolist()
        found.append((out.sequences[0, len(ids) :].tolist(), gaps))
    return found
