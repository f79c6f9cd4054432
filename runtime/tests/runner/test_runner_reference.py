"""A checkpoint folder run step by step, beside transformers with the same folder."""

from __future__ import annotations

import pytest
import torch
from hardpoint.checkpoints import read_description
from hardpoint.sampling_params import SamplingParams

PROMPT = [5, 9, 3, 5, 9, 3, 5, 9]
LENGTH = 40
REPETITION = 1.3


@pytest.fixture(scope="module")
def reference(folder):
    """Greedy ids after PROMPT under a repetition penalty, and the raw scores they came from."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(penalty: float):
        tokens = torch.tensor([PROMPT])
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            max_new_tokens=LENGTH,
            repetition_penalty=penalty,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return out.sequences[0, len(PROMPT) :].tolist(), torch.cat(out.logits).log_softmax(-1)

    return run


@pytest.mark.parametrize("chunk", [None, 3])
def test_ids_and_scores_with_and_without_a_repetition_penalty(
    folder, reference, make_runner, make_driver, chunk
):
    runner = make_runner(description=read_description(str(folder)))
    found = {}
    for penalty in (1.0, REPETITION):
        driver = make_driver(runner)
        params = SamplingParams(
            temperature=0, repetition_penalty=penalty, logprobs=-1, max_tokens=None
        )
        driver.add("a", PROMPT, params)
        driver.run(LENGTH, chunk=chunk)
        ids, scores = reference(penalty)
        found[penalty] = ids
        assert driver.output("a") == ids
        for row, expected in zip(driver.logprobs["a"], scores, strict=True):
            by_id = dict(zip(row.ids[0], row.values[0], strict=True))
            ours = torch.tensor([by_id[token] for token in range(len(expected))])
            torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
        driver.finish("a")
        driver.step({})
    assert len(set(found[1.0])) < len(set(found[REPETITION])), "greedy loops, penalised it does not"
