"""Graphs on several ranks: collectives are replayed too, stages hand on what was replayed."""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from attrs import evolve
from hardpoint.config.schema import GraphConfig, ParallelConfig
from hardpoint.sampling_params import SamplingParams
from hardpoint_runtime.device import HostDeviceOps
from hardpoint_runtime.graphs.piecewise import EagerPiece
from hardpoint_runtime.model_runner import TorchModelRunner
from hardpoint_runtime.parallel.seat import take_seat

PATIENCE = 60.0


class Ranks:
    """The runners of all ranks, each on its thread, driven as one."""

    def __init__(self, contexts, platform, registry, plan_for):
        self.ended = threading.Event()
        self.pools = [ThreadPoolExecutor(1) for _ in contexts]
        self.runners = self.everywhere(self.start, contexts, [(platform, registry, plan_for)])
        self.sent: dict[str, int] = {}
        self.outputs: dict[str, list[int]] = {}

    def start(self, context, made_of):
        platform, registry, plan_for = made_of
        torch.set_num_threads(1)
        device = HostDeviceOps()
        runner = TorchModelRunner(context, platform, registry, device)
        runner.seat = take_seat(context, device, self.ended)
        runner.load_model()
        runner.initialize_kv_cache(plan_for(runner.get_kv_cache_spec(), 200))
        runner.warm_up()
        return runner

    def everywhere(self, function, *each):
        count = len(self.pools)
        each = [values * count if len(values) == 1 else values for values in each]
        futures = [
            pool.submit(function, *values) for pool, *values in zip(self.pools, *each, strict=True)
        ]
        done = [future.exception(timeout=PATIENCE) for future in futures]
        for error in done:
            if error is not None:
                self.ended.set()
                raise error
        return [future.result() for future in futures]

    def execute_model(self, plan):
        """Run one step on all ranks; tell all what was sampled, as pipeline stages need."""
        told = []
        for req_id in plan.running.req_ids:
            known = self.outputs.setdefault(req_id, [])
            told.append(tuple(known[self.sent.get(req_id, 0) :]))
            self.sent[req_id] = len(known)
        plan = evolve(plan, running=evolve(plan.running, new_tokens=tuple(told)))
        output = self.everywhere(lambda runner: runner.execute_model(plan), self.runners)[-1]
        for req_id, tokens in zip(output.req_ids, output.tokens, strict=True):
            self.outputs.setdefault(req_id, []).extend(tokens)
        return output

    def close(self):
        def leave(runner):
            runner.close()
            runner.seat.close()

        self.everywhere(leave, self.runners)
        for pool in self.pools:
            pool.shutdown()


@pytest.fixture
def make_ranks(make_context, platform, registry, plan_for):
    made = []
    descriptor = os.memfd_create("ranks")

    def make(tensor, pipeline, mode):
        context = make_context(
            parallel=ParallelConfig(
                tensor_parallel_size=tensor,
                pipeline_parallel_size=pipeline,
                collective_timeout=PATIENCE,
            ),
            graph=GraphConfig(graph_mode=mode, graph_sizes=(2, 4, 12), graph_warm_ups=0),
            max_num_seqs=4,
            max_num_batched_tokens=24,
        )
        contexts = [
            evolve(
                context,
                rank=rank,
                local_rank=rank,
                world_size=tensor * pipeline,
                rendezvous=f"file:///proc/self/fd/{descriptor}",
            )
            for rank in range(tensor * pipeline)
        ]
        made.append(Ranks(contexts, platform, registry, plan_for))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()
    os.close(descriptor)


def generated(runner, make_driver):
    """Tokens of three requests in chunks, and the modes that their steps ran in."""
    driver = make_driver(runner, rng=random.Random(3))
    for index, length in enumerate((9, 2, 17)):
        sampling = SamplingParams(temperature=1.0, seed=index, max_tokens=None)
        driver.add(f"r{index}", [(7 * index + 3 * at) % 97 for at in range(length)], sampling)
    modes = []
    for _ in range(14):
        counts = {name: min(driver.left(name), 7) for name in driver.tokens}
        stats = driver.step(counts).graph_stats
        modes.append(stats and stats.mode)
    return {name: driver.output(name) for name in driver.tokens}, modes


@pytest.mark.parametrize("mode", ["full_and_piecewise", "full", "piecewise"])
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_tokens_of_several_ranks_equal_those_of_one(
    tensor, pipeline, mode, make_ranks, make_runner, make_driver
):
    alone = make_runner(max_num_seqs=4, max_num_batched_tokens=24)
    expected, _ = generated(alone, make_driver)
    ranks = make_ranks(tensor, pipeline, mode)
    found, modes = generated(ranks, make_driver)
    assert found == expected
    replayed = {"FULL", "PIECEWISE"} if mode == "full_and_piecewise" else {mode.upper()}
    assert replayed <= set(modes) <= replayed | {"NONE"}
    assert modes.count("NONE") <= 2


def test_the_pieces_of_a_stage_are_those_of_its_layers(make_ranks):
    ranks = make_ranks(1, 2, "piecewise")
    for runner in ranks.runners:
        for each in runner.graphs.captured._graphs.values():
            assert len(each.graph.pieces) == 3
            assert isinstance(each.graph.pieces[1], EagerPiece)


def test_each_collective_is_one_operation_of_the_graph(make_ranks):
    """Two a layer and one for the embedding, whatever they do within."""
    ranks = make_ranks(2, 1, "full")
    for runner in ranks.runners:
        for each in runner.graphs.captured._graphs.values():
            calls = [call for work in each.graph.work for call in (work.function, *work.args[:1])]
            names = [getattr(call, "__name__", "") for call in calls]
            assert names.count("all_reduce") == 2 * 2 + 1
