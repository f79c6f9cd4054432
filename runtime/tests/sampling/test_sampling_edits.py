from __future__ import annotations

import numpy as np
import pytest
import torch
from hardpoint.sampling_params import SamplingParams
from hardpoint_runtime.device import HostDeviceOps
from hardpoint_runtime.sampling.batch import build_sampling_batch
from hardpoint_runtime.sampling.kept import WordEnds
from hardpoint_runtime.sampling.sampler import Sampler

GREEDY = {"temperature": 0, "max_tokens": None}


def edited(make_requests, wishes, logits, **more):
    batch = build_sampling_batch(
        make_requests(wishes), list(wishes), vocab_size=logits.shape[1], **more
    )
    before = logits.clone()
    result = Sampler(HostDeviceOps()).edit(logits, batch)
    assert torch.equal(logits, before)  # a copy was edited
    return result


def penalised(row, prompt, output, repetition, frequency, presence):
    """Row by row, token by token."""
    row = [float(x) for x in row]
    for token in set(prompt) | set(output):
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token in set(output):
        row[token] -= frequency * output.count(token)
        row[token] -= presence
    return row


def test_penalties_against_plain_lines(make_requests):
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(size=(8, 20)).astype(np.float32) * 3)
    wishes, expected = {}, []
    for row in range(8):
        prompt = rng.integers(0, 20, 6).tolist()
        output = rng.integers(0, 20, rng.integers(0, 9)).tolist()
        values = (
            (1.0, 0.0, 0.0)
            if row == 3
            else (rng.uniform(0.5, 2), rng.uniform(-2, 2), rng.uniform(-2, 2))
        )
        wishes[f"r{row}"] = (
            SamplingParams(
                **GREEDY,
                repetition_penalty=values[0],
                frequency_penalty=values[1],
                presence_penalty=values[2],
            ),
            prompt,
            output,
        )
        expected.append(penalised(logits[row], prompt, output, *values))
    result = edited(make_requests, wishes, logits)
    torch.testing.assert_close(result, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_presence_and_frequency_look_at_the_output_only(make_requests):
    wish = SamplingParams(**GREEDY, frequency_penalty=1, presence_penalty=1)
    result = edited(make_requests, {"a": (wish, [3, 3, 3], [4, 4])}, torch.zeros(1, 6))
    assert result[0].tolist() == [0, 0, 0, 0, -3, 0]


def test_allowed_bias_and_their_neighbours(make_requests):
    wishes = {
        "free": SamplingParams(**GREEDY),
        "allowed": SamplingParams(**GREEDY, allowed_token_ids=(2, 4, 2)),
        "biased": SamplingParams(**GREEDY, logit_bias={1: 5.0, 3: -500.0}),
    }
    logits = torch.arange(18.0).view(3, 6)
    result = edited(make_requests, wishes, logits)
    inf = torch.inf
    assert result[0].tolist() == logits[0].tolist()
    assert result[1].tolist() == [-inf, -inf, 8, -inf, 10, -inf]
    assert result[2].tolist() == [12, 18, 14, -85, 16, 17]  # clamped to 100


def test_an_answer_does_not_end_before_its_least_length(make_requests):
    wish = SamplingParams(**GREEDY, min_tokens=2, stop_token_ids=(3,))
    deaf = SamplingParams(**GREEDY, min_tokens=2, ignore_eos=True)
    wishes = {"young": (wish, [1], [7]), "old": (wish, [1], [7, 7]), "deaf": (deaf, [1], [])}
    result = edited(make_requests, wishes, torch.zeros(3, 6), eos_token_ids=(0, 5))
    inf = torch.inf
    assert result.tolist() == [[-inf, 0, 0, -inf, 0, -inf], [0] * 6, [0] * 6]


def test_a_request_that_may_only_end_may_end():
    wish = SamplingParams(**GREEDY, min_tokens=2, allowed_token_ids=(5,))
    assert not wish.early_ends(0, (5,))
    assert not wish.early_ends(0, ())
    other = SamplingParams(**GREEDY, min_tokens=2, allowed_token_ids=(4, 5))
    assert other.early_ends(0, (5,)) == {5}


def test_a_bad_word_is_barred_where_the_answer_ends_with_its_beginning(make_requests):
    words = ((2,), (3, 4), (3, 3, 5), (1, 3, 0))
    wishes = {
        # the prompt is no part of the answer
        "young": (SamplingParams(**GREEDY, bad_word_ids=words), [3, 3], []),
        "one": (SamplingParams(**GREEDY, bad_word_ids=words), [1], [3]),
        "two": (SamplingParams(**GREEDY, bad_word_ids=words), [1], [1, 3, 3]),
        "all": (SamplingParams(**GREEDY, bad_word_ids=words), [2], [3, 1, 3]),
        "free": (SamplingParams(**GREEDY), [1], [3, 3]),
    }
    result = edited(make_requests, wishes, torch.zeros(5, 6))
    barred = [row.isinf().nonzero()[:, 0].tolist() for row in result]
    assert barred == [[2], [2, 4], [2, 4, 5], [0, 2, 4], []]


def test_bad_words_against_plain_lines():
    rng = np.random.default_rng(3)
    for _ in range(300):
        output = rng.integers(0, 3, rng.integers(0, 7))
        words = [tuple(rng.integers(0, 3, rng.integers(1, 5)).tolist()) for _ in range(4)]
        expected = {
            token
            for token in range(3)
            for word in words
            if [*output.tolist(), token][-len(word) :] == list(word)
        }
        assert WordEnds(words).ends(output) == expected


def test_nobody_asks_nothing_is_edited(make_requests):
    wishes = {"a": SamplingParams(**GREEDY), "b": SamplingParams(temperature=1.0)}
    batch = build_sampling_batch(make_requests(wishes), ["a", "b"], vocab_size=10)
    assert not batch.edits_logits
    found = (batch.allowed, batch.banned, batch.bias, batch.penalties, batch.logprobs)
    assert found == (None, None, None, None, ())
    assert batch.draws.rows.tolist() == [1]
    assert (batch.draws.min_p, batch.draws.top_k, batch.draws.top_p) == (None, None, None)
    greedy = build_sampling_batch(make_requests({"a": wishes["a"]}), ["a"], vocab_size=10)
    assert greedy.draws is None


def test_each_feature_appears_when_one_asks(make_requests):
    wishes = {
        "plain": SamplingParams(**GREEDY),
        "k": SamplingParams(top_k=3),
        "m": SamplingParams(min_p=0.1),
        "r": SamplingParams(repetition_penalty=1.1),
        "l": SamplingParams(**GREEDY, logprobs=0),
    }
    batch = build_sampling_batch(make_requests(wishes), list(wishes), vocab_size=10)
    assert batch.draws.rows.tolist() == [1, 2, 3]
    assert batch.draws.top_k.tolist() == [3, 0, 0]
    assert batch.draws.top_p.tolist() == [1, 1, 1]
    assert batch.draws.min_p.tolist() == pytest.approx([0, 0.1, 0])
    assert set(batch.penalties.places.rows.tolist()) == {3}
    assert [ask.row for ask in batch.logprobs] == [4]


def test_a_row_inherits_nothing_from_who_was_there_before(make_requests, sample):
    first = {"a": SamplingParams(top_k=1, repetition_penalty=1.5, logprobs=3, min_p=0.5)}
    requests = make_requests(first)
    requests.forget(["a"])
    from hardpoint.messages import NewRequestData

    plain = SamplingParams(**GREEDY)
    requests.add(NewRequestData(req_id="b", prompt=(1,), sampling=plain, block_ids=()))
    assert requests.slot_of("b") == 0
    batch = build_sampling_batch(requests, ["b"], vocab_size=10)
    assert (batch.draws, batch.penalties, batch.logprobs) == (None, None, ())
