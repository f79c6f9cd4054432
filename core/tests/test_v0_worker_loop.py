"""The older API's loop (rows V1 to V9): one loop at a time, steps in order, errors at its end."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest
from hardpoint.errors import LifecycleError, UnsupportedError
from hardpoint.kv_cache import KVCacheSpec
from hardpoint.messages import ModelRunnerOutput, SchedulerOutput
from hardpoint.sampling_params import SamplingParams
from hardpoint.v0.messages import ExecuteModelRequest, SequenceData, SequenceGroupMetadata
from hardpoint.v0.worker_loop import LOOP, WorkerLoop, uniform_plan

SPEC = KVCacheSpec(block_size=4, num_kv_heads=1, head_size_k=2, head_size_v=2, dtype="float32")


class Services:
    """What an executor has besides."""

    specs = ({"layer": SPEC},)
    planned = None

    def called_from_worker(self):
        return False

    def get_kv_cache_specs(self):
        return list(self.specs)

    def initialize_cache(self, plans):
        self.planned = plans
        return "warm"


class Fake(WorkerLoop, Services):
    """Keeps a diary instead of workers."""

    def __init__(self):
        super().__init__()
        self.diary = []
        self.loops = []
        self.answers = {}

    def _driver_execute_model(self, execute_model_req, non_block=False):
        if execute_model_req is None:
            self.diary.append("end")
            for loop in self.loops:
                if not loop.done():
                    loop.set_result(None)
            return None
        self.diary.append(execute_model_req.step_id)
        future = Future()
        step_id = execute_model_req.step_id
        future.set_result(self.answers.get(step_id, ModelRunnerOutput(step_id=step_id)))
        return future if non_block else future.result()

    def _run_workers(
        self,
        method,
        *args,
        async_run_tensor_parallel_workers_only=False,
        max_concurrent_workers=None,
        **kwargs,
    ):
        assert async_run_tensor_parallel_workers_only
        self.diary.append(method)
        self.loops.append(Future())
        return [self.loops[-1]]

    def _wait_for_tasks_completion(self, parallel_worker_tasks):
        for task in parallel_worker_tasks:
            task.result(60)


def step(number):
    return SchedulerOutput(step_id=number)


def test_the_first_step_begins_the_one_loop_and_each_runs_the_driver_alone():
    """Rows V1 and V2."""
    fake = Fake()
    assert fake.execute_model(step(1)).step_id == 1
    assert fake.execute_model(step(2)).step_id == 2
    assert fake.diary == [LOOP, 1, 2]
    fake.stop_remote_worker_execution_loop()
    assert fake.parallel_worker_tasks is None
    assert fake.execute_model(step(3), non_block=True).result().step_id == 3
    assert fake.diary == [LOOP, 1, 2, "end", LOOP, 3]


def test_a_driver_that_gives_nothing_is_an_error():
    fake = Fake()
    fake.answers[1] = None
    with pytest.raises(LifecycleError, match="gave no output"):
        fake.execute_model(step(1))


def test_no_loop_needs_no_end_and_an_end_raises_what_a_worker_raised():
    """Row V3."""
    fake = Fake()
    fake.stop_remote_worker_execution_loop()
    assert fake.diary == []
    fake.execute_model(step(1))
    fake.loops[0].set_exception(KeyError("of a looping worker"))
    with pytest.raises(KeyError, match="of a looping worker"):
        fake.stop_remote_worker_execution_loop()
    assert fake.parallel_worker_tasks is None
    fake.execute_model(step(2))
    fake.stop_remote_worker_execution_loop()


def test_the_three_methods_are_mandatory():
    """Row V4."""
    with pytest.raises(TypeError, match="_driver_execute_model"):
        WorkerLoop()


def test_async_steps_come_in_order_in_one_loop():
    """Row V7."""

    async def run(fake):
        outputs = await asyncio.gather(*(fake.execute_model_async(step(n)) for n in range(4)))
        await fake.stop_remote_worker_execution_loop_async()
        await fake.stop_remote_worker_execution_loop_async()
        return [output.step_id for output in outputs]

    fake = Fake()
    assert asyncio.run(run(fake)) == [0, 1, 2, 3]
    assert fake.diary == [LOOP, 0, 1, 2, 3, "end"]


def test_the_driver_alone_can_be_awaited():
    async def run(fake):
        output = await fake._driver_execute_model_async(step(5))
        return output.step_id, await fake._driver_execute_model_async()

    assert asyncio.run(run(Fake())) == (5, None)


def test_started_twice_there_is_one_loop_and_cancelled_there_is_none():
    """Row V8."""

    async def run(fake):
        tasks = [asyncio.ensure_future(fake._start_worker_execution_loop()) for _ in range(2)]
        while not fake.diary:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert fake.diary == [LOOP]
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in done)

    fake = Fake()
    asyncio.run(run(fake))
    assert fake.diary == [LOOP, "end"]
    assert fake.parallel_worker_tasks is None


def request(output=(), computed=0):
    data = SequenceData(
        prompt_token_ids=(1, 2), output_token_ids=output, num_computed_tokens=computed
    )
    group = SequenceGroupMetadata(
        request_id="a",
        is_prompt=not output,
        seq_data={7: data},
        block_tables={7: (1,)},
        sampling_params=SamplingParams(temperature=0),
    )
    return ExecuteModelRequest(seq_group_metadata_list=[group])


def test_steps_of_the_older_api_give_its_outputs():
    fake = Fake()
    fake.answers[1] = ModelRunnerOutput(step_id=1, req_ids=("a",), tokens=((5,),))
    (output,) = fake.execute_model(request())
    (sample,) = output.outputs[0].samples
    assert (sample.parent_seq_id, sample.output_token) == (7, 5)
    fake.answers[2] = ModelRunnerOutput(step_id=2, req_ids=("a",), tokens=((6,),))
    (output,) = asyncio.run(fake.execute_model_async(request(output=(5,), computed=2)))
    assert output.outputs[0].samples[0].output_token == 6
    assert fake.diary == [LOOP, 1, 2]


def test_the_older_cache_is_a_number_of_blocks():
    fake = Fake()
    assert fake.initialize_cache(9, 0) == "warm"
    (plan,) = fake.planned
    assert (plan.num_blocks, plan.block_size) == (9, 4)
    assert plan.tensors[0].num_bytes == 9 * fake.specs[0]["layer"].page_bytes
    with pytest.raises(UnsupportedError, match="3 KV blocks of the host"):
        fake.initialize_cache(9, 3)
    assert fake.initialize_cache([plan]) == "warm"


def test_layers_of_several_kinds_need_plans():
    spec = Services.specs[0]["layer"]
    other = KVCacheSpec(
        block_size=4, num_kv_heads=1, head_size_k=2, head_size_v=2, dtype="float32", kind="window"
    )
    with pytest.raises(UnsupportedError, match="several kinds of layers"):
        uniform_plan({"a": spec, "b": other}, 9)
