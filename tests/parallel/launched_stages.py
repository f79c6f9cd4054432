"""One of two stages under a launcher, which rank 0 drives by the older API, two steps in flight.

``launched_stages.py FILE``: rank 0 writes what it got one by one, and what two at a time.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import small_engine
from hardpoint.sampling_params import SamplingParams
from hardpoint.v0.messages import ExecuteModelRequest, SequenceData, SequenceGroupMetadata

PROMPTS = {"a": (5, 9, 3, 7), "b": (8, 2, 6, 4, 1)}
BLOCKS = {"a": (1, 2, 3), "b": (4, 5, 6)}
STEPS = 6


def request(name, said, finished):
    """Return the next step of one request alone."""
    known = len(PROMPTS[name]) + len(said)
    group = SequenceGroupMetadata(
        request_id=name,
        is_prompt=not said,
        seq_data={
            0: SequenceData(
                prompt_token_ids=PROMPTS[name],
                output_token_ids=tuple(said),
                num_computed_tokens=known - 1 if said else 0,
            )
        },
        block_tables={0: BLOCKS[name]},
        sampling_params=SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True),
    )
    return ExecuteModelRequest(
        seq_group_metadata_list=[group], finished_requests_ids=[] if said else finished
    )


def token(outputs):
    (output,) = outputs
    return output.outputs[0].samples[0].output_token


async def two_at_a_time(executor):
    said = {name: [] for name in PROMPTS}
    for _ in range(STEPS):
        both = [executor.execute_model_async(request(name, said[name], [name])) for name in PROMPTS]
        for name, outputs in zip(PROMPTS, await asyncio.gather(*both), strict=True):
            said[name].append(token(outputs))
    await executor.stop_remote_worker_execution_loop_async()
    return said


def one_by_one(executor):
    said = {name: [] for name in PROMPTS}
    for _ in range(STEPS):
        for name in PROMPTS:
            said[name].append(token(executor.execute_model(request(name, said[name], [name]))))
    executor.stop_remote_worker_execution_loop()
    return said


keys = {"executor": "external_launcher", "plugins.external_launcher.driver_only": True}
with small_engine.start(pipeline_parallel_size=2, **keys) as llm:
    executor = llm.core.executor
    executor.converter._step_id = 1_000
    found = {
        "one": one_by_one(executor),
        "two": asyncio.run(two_at_a_time(executor)),
        "again": one_by_one(executor),
    }
    Path(sys.argv[1]).write_text(json.dumps(found))
