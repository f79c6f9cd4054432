"""Steps that are awaited, over pipeline stages of a real model: two on their way at a time, in the
same order on every stage (row V7).
"""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest
from hardpoint.messages import CachedRequestData, NewRequestData, SchedulerOutput
from hardpoint.sampling_params import SamplingParams

pytestmark = pytest.mark.slow

PROMPTS = {"a": (5, 6, 7), "b": (9, 8)}
BLOCKS = {"a": (1, 2), "b": (3, 4)}
LENGTH = 4


def _small_engine():
    path = Path(__file__).parents[3] / "tests" / "parallel" / "small_engine.py"
    spec = importlib.util.spec_from_file_location("ray_small_engine", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


small_engine = _small_engine()


def plan(number, req_id, found):
    """Plan the next step of one request, for which so many tokens were ``found``."""
    given = len(found)
    if not given:
        prompt = PROMPTS[req_id]
        new = NewRequestData(
            req_id=req_id,
            prompt=prompt,
            block_ids=(BLOCKS[req_id],),
            sampling=SamplingParams(temperature=0),
        )
        tokens = {req_id: len(prompt)}
        return SchedulerOutput(
            step_id=number, new=(new,), num_tokens=tokens, total_tokens=len(prompt)
        )
    computed = len(PROMPTS[req_id]) + given - 1
    running = CachedRequestData(
        req_ids=(req_id,),
        new_blocks=(None,),
        num_computed=(computed,),
        num_output=(given,),
        new_tokens=((found[-1],),),  # the first stage samples none
    )
    return SchedulerOutput(step_id=number, running=running, num_tokens={req_id: 1}, total_tokens=1)


def watch(worker):
    """Have the worker keep the numbers of its steps, in the order in which it begins them."""
    worker.begun = []
    step = worker.execute_model

    def execute_model(planned):
        worker.begun.append(planned.step_id)
        return step(planned)

    worker.execute_model = execute_model


def begun(worker):
    return worker.begun


async def two_at_a_time(executor):
    found = {req_id: [] for req_id in PROMPTS}
    for given in range(LENGTH):
        steps = [
            executor.execute_model_async(plan(1000 + 2 * given + place, req_id, found[req_id]))
            for place, req_id in enumerate(PROMPTS)
        ]
        for output in await asyncio.gather(*steps):
            (req_id,), (tokens,) = output.req_ids, output.tokens
            found[req_id] += tokens
    return found


def one_by_one(executor):
    found = {req_id: [] for req_id in PROMPTS}
    for req_id, tokens in found.items():
        for number in range(LENGTH):
            output = executor.execute_model(plan(1000 + number, req_id, tokens))
            tokens.extend(output.tokens[0])
    return found


@pytest.mark.parametrize("executor", ["ray", "ray_legacy"])
def test_awaited_steps_keep_their_order_on_every_stage(session, executor):
    with small_engine.start(executor="uni") as llm:
        expected = one_by_one(llm.executor)
    with small_engine.start(executor=executor, pipeline_parallel_size=2) as llm:
        stages = llm.executor
        stages.collective_rpc(watch)
        assert asyncio.run(two_at_a_time(stages)) == expected
        order = list(range(1000, 1000 + 2 * LENGTH))
        assert stages.collective_rpc(begun) == [order, order]
