"""Steps of the older API, converted: workers that only hear differences know what it says whole."""

from __future__ import annotations

import pytest
from attrs import evolve
from hardpoint.messages import Logprobs, MessageError, ModelRunnerOutput
from hardpoint.pooling_params import PoolingParams
from hardpoint.sampling_params import SamplingParams
from hardpoint.v0.conversion import StepConverter
from hardpoint.v0.messages import (
    ExecuteModelRequest,
    LoRARequest,
    PromptAdapterRequest,
    SequenceData,
    SequenceGroupMetadata,
)

GREEDY = SamplingParams(temperature=0)


class Worker:
    """What a worker remembers, by the rules of the messages; ``samples``: a last stage."""

    def __init__(self, *, samples: bool) -> None:
        self.samples = samples
        self.tokens: dict[str, list[int]] = {}
        self.blocks: dict[str, list[int]] = {}
        self.prompts: dict[str, int] = {}

    def run(self, plan) -> ModelRunnerOutput:
        plan.check()
        for req_id in plan.finished:
            for table in (self.tokens, self.blocks, self.prompts):
                del table[req_id]
        computed = {}
        for new in plan.new:
            new.check()
            assert new.req_id not in self.tokens
            self.tokens[new.req_id] = list(new.prefill_tokens or new.prompt)
            self.blocks[new.req_id] = list(new.block_ids[0])
            self.prompts[new.req_id] = len(new.prompt)
            computed[new.req_id] = new.num_computed
        running = plan.running
        for index, req_id in enumerate(running.req_ids):
            tokens = self.tokens[req_id]
            if req_id in running.all_tokens:
                tokens[:] = running.all_tokens[req_id]
            else:
                tokens += running.told(index, len(tokens) - self.prompts[req_id])
            assert len(tokens) == self.prompts[req_id] + running.num_output[index]
            blocks = running.new_blocks[index]
            if req_id in running.resumed:
                self.blocks[req_id] = []
            self.blocks[req_id] += blocks[0] if blocks else ()
            computed[req_id] = running.num_computed[index]
        rows = {}
        for req_id, count in plan.num_tokens.items():
            end = computed[req_id] + count
            assert end <= len(self.tokens[req_id])
            ends = end == len(self.tokens[req_id])
            rows[req_id] = (1000 + sum(self.tokens[req_id]) % 97,) if ends else ()
        if self.samples:
            for req_id, row in rows.items():
                self.tokens[req_id] += row
        return ModelRunnerOutput(
            step_id=plan.step_id, req_ids=tuple(rows), tokens=tuple(rows.values())
        )


class Driver:
    """Runs steps on two stages, and checks that both know what the step said."""

    def __init__(self, **more) -> None:
        self.converter = StepConverter(**more)
        self.stages = [Worker(samples=False), Worker(samples=True)]

    def step(self, *groups, **more):
        request = ExecuteModelRequest(seq_group_metadata_list=groups, **more)
        self.plan = self.converter.plan(request)
        output = [stage.run(self.plan) for stage in self.stages][-1]
        said = {
            (data.prompt_token_ids + data.output_token_ids, tuple(group.block_tables[seq_id]))
            for group in groups
            for seq_id, data in group.seq_data.items()
        }
        first, _ = self.stages
        scheduled = {
            (tuple(first.tokens[req_id]), tuple(first.blocks[req_id]))
            for req_id in self.plan.num_tokens
        }
        assert scheduled == said
        return self.converter.sampler_output(request, output)


def group(request_id="a", *, prompt=(1, 2, 3), output=(), computed=0, blocks=(7,), **more):
    seq_data = {
        0: SequenceData(
            prompt_token_ids=prompt, output_token_ids=output, num_computed_tokens=computed
        )
    }
    values = {
        "request_id": request_id, "is_prompt": not output, "seq_data": seq_data,
        "block_tables": {0: blocks}, "sampling_params": GREEDY,
    }  # fmt: skip
    return SequenceGroupMetadata(**(values | more))


def sampled(answer, index=0) -> list[int]:
    return [sample.output_token for sample in answer.outputs[index].samples]


def test_a_request_from_its_prompt_to_its_end():
    driver = Driver()
    chunk = driver.step(group(token_chunk_size=2, do_sample=False))
    assert chunk.outputs[0].samples == []
    assert [new.req_id for new in driver.plan.new] == ["a"]
    (one,) = sampled(driver.step(group(computed=2)))
    (two,) = sampled(driver.step(group(output=(one,), computed=3, blocks=(7, 9))))
    assert driver.plan.running.new_blocks == (((9,),),)
    assert driver.plan.running.new_tokens == ((one,),)
    assert not driver.plan.running.all_tokens
    driver.step(group(output=(one, two), computed=4, blocks=(7, 9)))
    assert driver.plan.running.new_blocks == (None,)
    driver.step(finished_requests_ids=["a", "unknown"])
    assert driver.plan.finished == {"a"}
    assert driver.stages[0].tokens == driver.stages[1].tokens == {}
    driver.step(group())
    assert [new.req_id for new in driver.plan.new] == ["a"]


def test_a_request_that_lost_its_blocks_has_them_replaced():
    driver = Driver()
    (one,) = sampled(driver.step(group(), group("b", prompt=(5,), blocks=(8,))))
    driver.step(group("b", prompt=(5,), output=(6,), computed=1, blocks=(8,)))
    driver.step(group(output=(one,), is_prompt=True, blocks=(3, 4)))
    assert driver.plan.running.resumed == {"a"}
    assert driver.plan.num_tokens == {"a": 4}


def test_tokens_that_the_driver_chose_otherwise_are_told_whole():
    driver = Driver()
    driver.step(group())
    driver.step(group(output=(5,), computed=3))
    assert driver.plan.running.all_tokens == {"a": (1, 2, 3, 5)}


def test_sequences_of_a_request_part_and_end_one_by_one():
    driver = Driver()
    (one,) = sampled(driver.step(group()))
    data = {
        number: SequenceData(
            prompt_token_ids=(1, 2, 3), output_token_ids=(token,), num_computed_tokens=3
        )
        for number, token in enumerate((one, 50, 60))
    }
    tables = {0: (7,), 1: (8,), 2: (9,)}
    forked = evolve(group(output=(one,)), seq_data=data, block_tables=tables)
    answer = driver.step(forked, blocks_to_copy=[(7, 8), (7, 9)])
    assert driver.plan.running.req_ids == ("a",)
    assert [(new.req_id, new.prefill_tokens) for new in driver.plan.new] == [
        ("a/1", (1, 2, 3, 50)), ("a/2", (1, 2, 3, 60)),
    ]  # fmt: skip
    assert driver.plan.block_copies == ((0, 7, 8), (0, 7, 9))
    assert [sample.parent_seq_id for sample in answer.outputs[0].samples] == [0, 1, 2]
    _, two, _ = sampled(answer)
    kept = SequenceData(
        prompt_token_ids=(1, 2, 3), output_token_ids=(50, two), num_computed_tokens=4
    )
    driver.step(evolve(forked, seq_data={1: kept}, block_tables={1: (8,)}))
    assert driver.plan.finished == {"a", "a/2"}
    assert driver.plan.running.req_ids == ("a/1",)
    driver.step(finished_requests_ids=["a"])
    assert driver.plan.finished == {"a/1"}


def test_scores_and_vectors_come_in_the_order_of_the_step():
    converter = StepConverter()
    request = ExecuteModelRequest(seq_group_metadata_list=[group("b"), group("a")])
    converter.plan(request)
    rows = Logprobs(
        ids=((9, 4, 9, 5),), values=((-2.0, -1.0, -2.0, -3.0),), ranks=((2, 1, 2),), num_best=2
    )
    prompt = evolve(rows, ids=rows.ids * 2, values=rows.values * 2, ranks=rows.ranks * 2)
    output = ModelRunnerOutput(
        step_id=1, req_ids=("a", "b"), tokens=((9,), (8,)),
        logprobs={"a": rows}, prompt_logprobs={"a": prompt}, pooled={"b": (0.5, 1.0)},
    )  # fmt: skip
    second, first = converter.sampler_output(request, output).outputs
    (sample,) = first.samples
    assert sample.output_token == 9
    assert [(token, score.logprob, score.rank) for token, score in sample.logprobs.items()] == [
        (9, -2.0, 2), (4, -1.0, 1), (5, -3.0, None),
    ]  # fmt: skip
    assert first.prompt_logprobs[0] is None
    assert [list(each) for each in first.prompt_logprobs[1:]] == [[9, 4, 5]] * 2
    assert second.samples[0].logprobs == {}
    assert second.prompt_logprobs is None
    vectors = converter.pooler_output(request, output).outputs
    assert [vector.data for vector in vectors] == [(0.5, 1.0), None]


def test_what_travels_with_a_request_is_converted():
    converter = StepConverter(draw_seed=lambda: 11)
    request = ExecuteModelRequest(
        seq_group_metadata_list=[
            group(
                sampling_params=SamplingParams(),
                lora_request=LoRARequest(lora_name="n", lora_int_id=3, lora_path="p"),
                prompt_adapter_request=PromptAdapterRequest(
                    prompt_adapter_name="m", prompt_adapter_id=4,
                    prompt_adapter_local_path="q", prompt_adapter_num_virtual_tokens=5,
                ),
            ),
            group("b", sampling_params=None, pooling_params=PoolingParams("last")),
        ]
    )  # fmt: skip
    first, second = converter.plan(request).new
    assert first.sampling.seed == 11
    assert (first.lora.id, first.lora.name, first.lora.path) == (3, "n", "p")
    adapter = first.prompt_adapter
    assert (adapter.id, adapter.name, adapter.path) == (4, "m", "q")
    assert adapter.num_virtual_tokens == 5
    assert second.pooling == PoolingParams("last")
    second.check()


def test_swaps_are_copies_where_blocks_stand_for_the_host_s():
    swaps = {"blocks_to_swap_in": [(1, 20)], "blocks_to_swap_out": [(21, 2)]}
    plan = StepConverter(host_pool=100).plan(ExecuteModelRequest(**swaps))
    assert plan.block_copies == ((0, 101, 20), (0, 21, 102))
    with pytest.raises(MessageError, match="name host_pool"):
        StepConverter().plan(ExecuteModelRequest(**swaps))


@pytest.mark.parametrize(
    ("groups", "more", "words"),
    [
        ([], {"num_steps": 8}, "num_steps is 8; workers here take 1 only"),
        ([], {"virtual_engine": 1}, "virtual_engine is 1"),
        ([group(multi_modal_data={"image": 1})], {}, "'a' has multi_modal_data"),
        (
            [group(token_chunk_size=2)],
            {},
            "2 of 3 tokens are to be computed, and do_sample is True",
        ),
        ([group(do_sample=False)], {}, "3 of 3 tokens"),
        ([group(token_chunk_size=4)], {}, "4 of 3 tokens"),
        ([group(computed=3)], {}, "0 of 0 tokens"),
        ([group(block_tables={})], {}, "sequence 0: it has no block table"),
        ([group(seq_data={})], {}, "has no sequence"),
        ([group(sampling_params=None)], {}, "sampling_params or pooling_params"),
        ([group(pooling_params=PoolingParams())], {}, "sampling_params or pooling_params"),
    ],
)
def test_what_cannot_be_converted_is_refused_and_forgotten(groups, more, words):
    converter = StepConverter()
    with pytest.raises(MessageError, match=words):
        converter.plan(ExecuteModelRequest(seq_group_metadata_list=groups, **more))
    plan = converter.plan(ExecuteModelRequest(seq_group_metadata_list=[group()]))
    assert (plan.step_id, len(plan.new)) == (1, 1)
