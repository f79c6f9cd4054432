"""What the sampling stages are given, for each parameter, and that nobody gets a neighbour's."""

from __future__ import annotations

import numpy as np
import pytest
from hardpoint.errors import InvalidRequestError
from hardpoint.messages import GrammarOutput, NewRequestData, SchedulerOutput
from hardpoint.sampling_params import SamplingParams
from hardpoint_tpu import draws
from hardpoint_tpu.requests import Requests
from hardpoint_tpu.sampling import build_sampling, ending_words, grammar_masks

V = 40


@pytest.fixture
def make():
    """Requests of the given parameters, named r0, r1 ..., and the arrays of them all."""

    def build(*params, rows=4, prompt=(1, 2, 3), output=(), masks=None, eos=(5,)):
        requests = Requests(capacity=4, max_model_len=64, block_size=8, width=8, num_blocks=99)
        fresh = tuple(
            NewRequestData(
                req_id=f"r{index}", prompt=prompt, sampling=each, block_ids=((index + 1,),)
            )
            for index, each in enumerate(params)
        )
        counts = {each.req_id: len(prompt) for each in fresh}
        requests.apply(
            SchedulerOutput(
                step_id=1, new=fresh, num_tokens=counts, total_tokens=sum(counts.values())
            )
        )
        for req_id in requests.ids:
            for token in output:
                requests.append_token(req_id, token)
        return build_sampling(
            requests, requests.ids, rows, vocabulary=V, eos_token_ids=eos, masks=masks
        )

    return build


GREEDY = SamplingParams(temperature=0)


def test_what_nobody_asks_for_is_not_there(make):
    arrays = make(GREEDY, SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.1))
    assert arrays.draws is None
    assert arrays.edits is None
    assert arrays.penalties is None
    assert arrays.asks == {}


def test_draws_are_padded_with_greedy_rows(make):
    arrays = make(
        SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=4),
        GREEDY,
        SamplingParams(temperature=0.001, top_k=-1, seed=9),
    )
    expected = [[0.5, -1, 0.01, -1], [0.1, 0, 0, 0], [0.9, 1, 1, 1]]
    assert arrays.draws.numbers.tolist() == np.asarray(expected, np.float32).tolist()
    assert arrays.draws.top_k.tolist() == [7, 0, 0, 0]
    assert arrays.draws.keys.tolist() == draws.keys([(4, 3), (0, 3), (9, 3)], 4).tolist()


def test_the_key_of_a_draw_is_that_of_the_position_to_fill(make):
    arrays = make(SamplingParams(temperature=1, seed=4), output=(8, 9))
    assert arrays.draws.keys[:, 0].tolist() == draws.keys([(4, 5)], 1)[:, 0].tolist()


def test_allowed_ids_forbid_all_others_in_their_row_alone(make):
    forbidden, bias = make(GREEDY, SamplingParams(allowed_token_ids=[3, 9], seed=1)).edits
    assert np.flatnonzero(~forbidden[1]).tolist() == [3, 9]
    assert not forbidden[[0, 2, 3]].any()
    assert not bias.any()


def test_bias_is_clamped_to_a_hundred(make):
    forbidden, bias = make(GREEDY, SamplingParams(logit_bias={2: 1e9, 4: -0.5}, seed=1)).edits
    assert bias[1, [2, 4]].tolist() == [100.0, -0.5]
    assert np.count_nonzero(bias) == 2
    assert not forbidden.any()


def test_bad_words_forbid_their_last_id_where_the_output_ends_with_the_others(make):
    params = SamplingParams(temperature=0, bad_word_ids=[[7], [8, 9], [6, 8, 4], [3, 11]])
    forbidden, _ = make(params, output=(6, 8)).edits
    assert np.flatnonzero(forbidden[0]).tolist() == [4, 7, 9]
    forbidden, _ = make(params).edits  # the prompt's end is no part of a word
    assert np.flatnonzero(forbidden[0]).tolist() == [7]


def test_words_longer_than_the_output_match_nothing():
    assert ending_words([(1, 2, 3)], [2]) == set()
    assert ending_words([(1, 2, 3)], [1, 2]) == {3}
    assert ending_words([(5,)], []) == {5}


def test_the_least_length_is_forbidden_ends(make):
    forbidden, _ = make(SamplingParams(temperature=0, min_tokens=3), GREEDY).edits
    assert np.flatnonzero(forbidden[0]).tolist() == [5]
    assert make(SamplingParams(temperature=0, min_tokens=2), output=(1, 1)).edits is None


def test_penalties_count_the_output_and_mark_the_prompt(make):
    params = SamplingParams(
        temperature=0, repetition_penalty=1.5, frequency_penalty=0.25, presence_penalty=-1
    )
    penalties = make(GREEDY, params, output=(7, 7, 2)).penalties
    assert penalties.penalties.tolist() == [[1, 1.5, 1, 1], [0, 0.25, 0, 0], [0, -1, 0, 0]]
    counts = {2: 1, 7: 2}
    assert {
        int(i): int(penalties.counts[1, i]) for i in np.flatnonzero(penalties.counts[1])
    } == counts
    assert np.flatnonzero(penalties.prompted[1]).tolist() == [1, 2, 3]
    assert not penalties.counts[[0, 2, 3]].any()
    assert not penalties.prompted[[0, 2, 3]].any()


def test_asks_for_log_probabilities_are_kept_by_row(make):
    params = SamplingParams(logprobs=2, seed=1)
    assert make(GREEDY, params).asks == {1: params}


def mask(*allowed: int) -> bytes:
    bits = np.zeros(64, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def test_a_grammar_mask_reaches_its_request_whatever_the_order(make):
    grammar = GrammarOutput(
        req_ids=("r1", "gone", "r0"), masks=((mask(3),), (mask(1),), (mask(7, 39),))
    )
    masks = grammar_masks(grammar, V)
    forbidden, _ = make(GREEDY, GREEDY, GREEDY, masks=masks).edits
    assert np.flatnonzero(~forbidden[0]).tolist() == [7, 39]
    assert np.flatnonzero(~forbidden[1]).tolist() == [3]
    assert not forbidden[2:].any()


def test_a_grammar_and_allowed_ids_leave_what_both_allow(make):
    params = SamplingParams(temperature=0, allowed_token_ids=[3, 9])
    masks = grammar_masks(GrammarOutput(req_ids=("r0",), masks=((mask(9, 12),),)), V)
    forbidden, _ = make(params, masks=masks).edits
    assert np.flatnonzero(~forbidden[0]).tolist() == [9]


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(InvalidRequestError, match="'a' has 4 bytes, a vocabulary of 40 needs 8"):
        grammar_masks(GrammarOutput(req_ids=("a",), masks=((b"1234",),)), V)
    assert grammar_masks(None, V) == {}
