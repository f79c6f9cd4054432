"""Runs a small random Llama of 6 query and 3 key-value heads in 5 layers."""

from __future__ import annotations

from pathlib import Path

KEYS = {
    "model": "dummy",
    "load_format": "dummy",
    "platform": "cpu",
    "dtype": "float32",
    "seed": 11,
    "block_size": 4,
    "num_kv_blocks": 26,
    "max_model_len": 64,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,
}
"""So few blocks and tokens that prompts are computed in pieces and requests preempted."""

PROMPTS = [
    [(7 * number + 3 * place) % 250 for place in range(4 + 9 * number)] for number in range(5)
]


def start(**keys):
    """Return the LLM."""
    from attrs import evolve
    from hardpoint.checkpoints import read_description
    from hardpoint.config.loading import load_config
    from hardpoint_engine import LLM

    config = load_config(overrides=KEYS | keys, environ={})
    described = read_description("dummy", "dummy")
    description = evolve(
        described,
        path=Path("odd"),
        # tied to embeddings that are random, it would say each token for ever
        hf_config={**described.hf_config, "tie_word_embeddings": False},
        num_layers=5,
        hidden_size=72,
        intermediate_size=100,
        num_heads=6,
        num_kv_heads=3,
        head_size=12,
    )
    return LLM.from_config(evolve(config, description=description))


def sampling():
    """Return the parameters of each prompt: greedy, drawn, penalised, with log-probabilities."""
    from hardpoint_engine import SamplingParams

    more = {"max_tokens": 16, "ignore_eos": True}
    return [
        SamplingParams(temperature=0, logprobs=2, **more),
        SamplingParams(temperature=0.9, seed=5, **more),
        SamplingParams(temperature=0, repetition_penalty=1.2, presence_penalty=0.4, **more),
        SamplingParams(temperature=1.2, top_k=20, top_p=0.9, min_p=0.01, seed=6, **more),
        SamplingParams(temperature=0, logit_bias={3: 2.0}, **more),
    ]


def answers(llm):
    """Return the ids of two rounds, the second with a warm prefix cache, and log-probabilities."""
    rounds = []
    for _ in range(2):
        results = llm.generate(PROMPTS, sampling())
        rounds.append([list(result.outputs[0].token_ids) for result in results])
    first = results[0].outputs[0].logprobs
    return {
        "tokens": rounds,
        "logprobs": [[value.logprob for value in row.values()] for row in first],
        "preemptions": llm.metrics.preemptions,
    }
