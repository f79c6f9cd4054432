"""Vectors of a whole engine on this platform, beside transformers' final hidden states."""

from __future__ import annotations

import pytest
import torch
from hardpoint.errors import InvalidRequestError
from hardpoint.logits_processor import LogitsProcessor
from hardpoint_engine import LLM, PoolingParams, SamplingParams
from hardpoint_engine.scheduling.results import NoNumbersError

LONGEST = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.3, tie_word_embeddings=True,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    words = {f"w{number}": number for number in range(256)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """The last one fills the context."""
    torch.manual_seed(1)
    return [torch.randint(0, 256, (length,)).tolist() for length in (1, 5, LONGEST)]


@pytest.fixture(scope="module")
def states(folder, prompts):
    """Each prompt's final hidden states [length, H]."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]


@pytest.fixture(scope="module", params=[16, 5], ids=["whole", "chunks"])
def llm(request, folder):
    with LLM(
        str(folder), platform="cpu", dtype="float32", max_model_len=LONGEST, block_size=16,
        num_kv_blocks=8, max_num_batched_tokens=32, prefill_chunk_size=request.param,
    ) as llm:  # fmt: skip
        yield llm


@pytest.mark.parametrize(
    ("kind", "pooled"),
    [
        ("mean", lambda states: states.mean(0)),
        ("last", lambda states: states[-1]),
        ("cls", lambda states: states[0]),
    ],
)
def test_vectors_are_those_of_transformers(llm, prompts, states, kind, pooled):
    for normalize in (False, True):
        results = llm.embed(prompts, PoolingParams(kind, normalize=normalize))
        assert [result.prompt_token_ids for result in results] == prompts
        for result, found in zip(results, states, strict=True):
            expected = pooled(found)
            if normalize:
                expected = torch.nn.functional.normalize(expected, dim=0)
            torch.testing.assert_close(
                torch.tensor(result.embedding), expected, atol=1e-4, rtol=1e-4
            )


def test_a_vector_needs_no_room_for_an_answer(llm, prompts):
    with pytest.raises(InvalidRequestError, match=r"at least one of them for the answer"):
        llm.generate(prompts[-1], SamplingParams(temperature=0))
    with pytest.raises(InvalidRequestError, match=r"context is 16 \(max_model_len\): shorten"):
        llm.embed([*prompts[-1], 1])


def lose_token(worker, token):
    """Corrupt the embedding of one token."""
    with torch.no_grad():
        for parameter in worker.get_model_runner().get_model().parameters():
            if parameter.shape == (256, 32):
                parameter[token] = torch.nan


def test_corrupt_weights_end_those_that_they_concern(folder):
    with LLM(str(folder), platform="cpu", max_model_len=LONGEST, num_kv_blocks=8) as llm:
        (before,) = llm.embed([[1, 2, 3]])
        llm.executor.collective_rpc(lose_token, args=(200,))
        with pytest.raises(NoNumbersError, match="no numbers for request"):
            llm.embed([[200, 1], [1, 2, 3]])
        assert llm.embed([[1, 2, 3]])[0].embedding == before.embedding
        assert llm.metrics.finished == {"stop": 3, "error": 1}


class Nothing(LogitsProcessor):
    def apply(self, logits, rows):
        pass


def test_logits_processors_of_the_configuration_and_vectors_exclude_each_other(folder):
    """Each alone fails by name; answers go on."""
    keys = {"platform": "cpu", "max_model_len": LONGEST, "num_kv_blocks": 8}
    with LLM(str(folder), logits_processors=[Nothing], **keys) as llm:
        with pytest.raises(InvalidRequestError, match=r"processors \(Nothing\) would have no say"):
            llm.embed([[1, 2, 3]])
        (answer,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2))
        assert len(answer.outputs[0].token_ids) == 2
