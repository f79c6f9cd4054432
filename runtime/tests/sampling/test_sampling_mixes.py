"""Whatever requests ask for, each gets in a batch what it gets alone: tokens and scores."""

from __future__ import annotations

import numpy as np
import torch
from hardpoint.config.schema import Config
from hardpoint.logits_processor import LogitsProcessor
from hardpoint.messages import GrammarOutput
from hardpoint.sampling_params import SamplingParams
from hardpoint_runtime.device import HostDeviceOps
from hardpoint_runtime.sampling.batch import build_sampling_batch
from hardpoint_runtime.sampling.processors import Processors
from hardpoint_runtime.sampling.sampler import Sampler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

VOCABULARY = 41
TOKENS = st.integers(0, VOCABULARY - 1)


class Shifts(LogitsProcessor):
    """Adds what a request names to every second token."""

    def apply(self, logits, rows):
        for row in range(len(rows.slots)):
            logits[row, ::2] += (rows.sampling(row).extra_args or {}).get("shift", 0)


class Halves(LogitsProcessor):
    """Leaves the best token the best."""

    argmax_invariant = True

    def apply(self, logits, rows):
        for row in range(len(rows.slots)):
            logits[row] *= (rows.sampling(row).extra_args or {}).get("half", 1)


def some(strategy):
    return st.none() | strategy


WISHES = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0, 0.01, 0.5, 1.0, 2.0]),
        "seed": st.integers(0, 2**32),
        "max_tokens": st.none(),
    },
    optional={
        "top_k": st.sampled_from([-1, 0, 1, 3, VOCABULARY, 10**9]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3, 1e-9]),
        "min_p": st.sampled_from([0.0, 0.05, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 0.7, 1.5]),
        "presence_penalty": st.sampled_from([0.0, -1.0, 2.0]),
        "frequency_penalty": st.sampled_from([0.0, -0.5, 1.0]),
        "min_tokens": st.integers(0, 8),
        "stop_token_ids": st.lists(TOKENS, max_size=3),
        "ignore_eos": st.booleans(),
        "logprobs": st.sampled_from([-1, 0, 2]),
        "logprob_token_ids": st.lists(TOKENS, max_size=3),
        "logit_bias": st.dictionaries(TOKENS, st.floats(-200, 200), max_size=3),
        "allowed_token_ids": st.lists(TOKENS, min_size=5, max_size=30),
        "bad_word_ids": st.lists(st.lists(TOKENS, min_size=1, max_size=2), max_size=3),
        "extra_args": st.fixed_dictionaries(
            {}, optional={"shift": st.sampled_from([-3.0, 2.0]), "half": st.just(0.5)}
        ),
    },
)
REQUESTS = st.lists(
    st.tuples(
        WISHES,
        st.lists(TOKENS, min_size=1, max_size=4),
        st.lists(TOKENS, max_size=6),
        some(st.sets(TOKENS, min_size=5)),
    ),
    min_size=2,
    max_size=6,
)


def packed(allowed):
    bits = np.zeros(-(-VOCABULARY // 32) * 32, dtype=np.uint8)
    bits[list(allowed)] = 1
    return (np.packbits(bits, bitorder="little").tobytes(),)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(REQUESTS, st.randoms(use_true_random=False))
def test_a_mix_of_parameters_is_its_rows_one_by_one(make_requests, mix, random):
    wishes = {
        f"r{index}": (SamplingParams(**wish), prompt, output)
        for index, (wish, prompt, output, _) in enumerate(mix)
    }
    masks = {f"r{index}": packed(each[3]) for index, each in enumerate(mix) if each[3]}
    grammar = GrammarOutput(req_ids=tuple(masks), masks=tuple(masks.values()))
    generator = torch.Generator().manual_seed(len(mix))
    logits = torch.randn(len(mix), VOCABULARY, generator=generator) * 3
    requests = make_requests({})
    processors = Processors([Shifts(Config()), Halves(Config())], requests)
    for name, wish in wishes.items():
        make_requests.add(requests, name, *wish)

    def run(names):
        batch = build_sampling_batch(
            requests, names, vocab_size=VOCABULARY, eos_token_ids=(1,), grammar=grammar,
            processors=processors.begin(names),
        )  # fmt: skip
        rows = logits[[int(name[1:]) for name in names]]
        found = Sampler(HostDeviceOps()).sample(rows, batch)
        return {
            name: (token, found.logprobs.get(row), found.nan_counts.get(row))
            for row, (name, token) in enumerate(zip(names, found.tokens, strict=True))
        }

    order = random.sample(sorted(wishes), len(wishes))
    together = run(order)
    for name in wishes:
        token, logprobs, nan_count = run([name])[name]
        assert (together[name][0], together[name][2]) == (token, nan_count)
        if logprobs is None:
            assert together[name][1] is None
            continue
        assert together[name][1].ids == logprobs.ids
        np.testing.assert_allclose(together[name][1].values, logprobs.values, atol=1e-5)
