"""A fake model whose next token is a function of what the request's blocks really hold."""

from __future__ import annotations

import random

import pytest
import torch
from hardpoint.kv_cache import KVCacheSpec
from hardpoint_runtime.attention.paged import kv_write
from hardpoint_runtime.model_runner import TorchModelRunner

VOCABULARY = 997


def next_token(tokens) -> int:
    """The true answer: a hash of all tokens in order."""
    value = 0
    for token in tokens:
        value = (value * 31 + token + 1) % VOCABULARY
    return value


class HistoryModel(torch.nn.Module):
    """Writes each token (and its position) to its slot, and reads a request's history back through
    its block table.
    """

    def kv_cache_spec(self, block_size, dtype):
        spec = KVCacheSpec(
            block_size=block_size, num_kv_heads=1, head_size_k=1, head_size_v=1, dtype="float32"
        )
        return {"memory": spec}

    def forward(self, token_ids, positions, step, rows=None):
        cache, metadata = step.kv_caches["memory"], step.attention["memory"]
        key, value = token_ids.float().view(-1, 1, 1), positions.float().view(-1, 1, 1)
        kv_write(key, value, cache.key, cache.value, metadata)
        hidden = torch.zeros(len(token_ids), 1, device=token_ids.device)
        for row in range(metadata.num_reqs):
            start, stop = metadata.query_start[row : row + 2]
            end = metadata.seq_lens[row]
            blocks = metadata.block_table[row, : -(-end // metadata.block_size)].long()
            tokens, places = (
                part[blocks].flatten()[:end].long().tolist() for part in (cache.key, cache.value)
            )
            seen = next_token(tokens) if places == list(range(end)) else 0
            hidden[start:stop] = -1.0  # only the last one is right
            hidden[stop - 1] = seen
        return hidden if rows is None else hidden[rows]

    def compute_logits(self, hidden):
        return torch.nn.functional.one_hot(hidden[:, 0].long(), VOCABULARY).float()


class HistoryRunner(TorchModelRunner):
    def make_model(self, operations):
        return HistoryModel()

    def load_weights(self, model):
        pass


def test_the_fake_sees_a_wrong_block(make_runner, make_driver):
    driver = make_driver(make_runner(HistoryRunner))
    driver.add("a", [1, 2, 3, 4, 5, 6])
    driver.step({"a": 6})
    assert driver.output("a") == [next_token([1, 2, 3, 4, 5, 6])]
    driver.runner.kv_cache.layers["memory"].key[driver.blocks["a"][0], 2] = 77
    driver.step({"a": 1})
    assert driver.output("a")[1] != next_token([1, 2, 3, 4, 5, 6, driver.output("a")[0]])


@pytest.mark.parametrize("seed", range(4))
def test_preempted_skipped_and_resumed_requests(make_runner, make_driver, seed):
    """Random plans: chunks, skipped steps, preemption with blocks reused at once, requests that
    come and go. Every token is that of an uninterrupted run.
    """
    rng = random.Random(seed)
    runner = make_runner(HistoryRunner, num_blocks=80, max_num_seqs=3)
    driver = make_driver(runner, rng=rng, num_blocks=80)
    expected: dict[str, list[int]] = {}
    done = preempted = 0
    for number in range(400):
        if len(driver.tokens) < 7 and rng.random() < 0.4:
            prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 20))]
            name = f"r{number}"
            driver.add(name, prompt)
            expected[name] = list(prompt)
            for _ in range(12):
                expected[name].append(next_token(expected[name]))
        for req_id in list(driver.known - driver.parked):
            if rng.random() < 0.12:
                driver.preempt(req_id)
                preempted += 1
        chosen = [r for r in driver.tokens if rng.random() < 0.6]
        rng.shuffle(chosen)
        driver.step({r: rng.randrange(1, driver.left(r) + 1) for r in chosen})
        for req_id, tokens in list(driver.tokens.items()):
            assert tokens == expected[req_id][: len(tokens)], f"seed {seed}, step {number}"
            if len(driver.output(req_id)) == 12:
                driver.finish(req_id)
                done += 1
    assert done > 20
    assert preempted > 50


def test_a_forgotten_request_comes_back_with_its_tokens(make_runner, make_driver):
    """After recovery the driver sends prompt and outputs to a worker that knows nothing."""
    from hardpoint.messages import NewRequestData, SchedulerOutput
    from hardpoint.sampling_params import SamplingParams

    runner = make_runner(HistoryRunner)
    known = [1, 2, 3]
    known.append(next_token(known))
    known.append(next_token(known))
    request = NewRequestData(
        req_id="a",
        prompt=(1, 2, 3),
        prefill_tokens=tuple(known),
        sampling=SamplingParams(temperature=0),
        block_ids=((7, 8),),
    )
    output = runner.execute_model(
        SchedulerOutput(step_id=1, new=(request,), num_tokens={"a": 5}, total_tokens=5)
    )
    assert output.tokens == ((next_token(known),),)
