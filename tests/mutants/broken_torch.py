"""Torch runners that are wrong in one way each: the toolkit's on the cpu, a part replaced."""

from __future__ import annotations

import numpy as np
from attrs import evolve
from hardpoint_cpu.worker import CpuWorker
from hardpoint_runtime.attention.builder import AttentionMetadataBuilder
from hardpoint_runtime.batch.requests import Requests
from hardpoint_runtime.memory.kv_cache import KVCache
from hardpoint_runtime.model_runner import TorchModelRunner
from hardpoint_runtime.pooling import Pooling
from hardpoint_runtime.sampling.sampler import Sampler
from mutation import broken


@broken("nothing")
class TwinTorch(TorchModelRunner):
    """Unbroken."""


class _OneSlotOff(AttentionMetadataBuilder):
    def build(self, *, slots, **values):
        slots = np.array(slots)
        last = slots % self.block_size == self.block_size - 1
        return super().build(slots=np.where(last, slots - 1, slots), **values)


@broken(
    "the last position of each block is written one slot early", "test_an_answer_over_many_blocks"
)
class TorchSlotOff(TorchModelRunner):
    def make_metadata_builders(self, kv_cache_config):
        return [_OneSlotOff(self.device, group.spec.block_size) for group in kv_cache_config.groups]


class _NeverZeroed(KVCache):
    def zero_blocks(self, block_ids):
        pass


@broken("blocks are not zeroed", "test_a_zeroed_block_keeps_nothing")
class TorchNotZeroed(TorchModelRunner):
    def make_kv_cache(self, kv_cache_config):
        return _NeverZeroed.allocate(kv_cache_config, self.device)


class _StaleTables(Requests):
    def update(self, plan):
        running = evolve(plan.running, resumed=frozenset())
        for req_id in plan.running.resumed:
            self[req_id].preempted = False
        super().update(evolve(plan, running=running))

    def park(self, req_ids):
        for req_id in req_ids:
            if req_id in self:
                self[req_id].preempted = True


@broken(
    "blocks of a resumed request are appended to its old ones",
    "test_a_preempted_request_resumes_with_other_blocks",
)
class TorchStaleTable(TorchModelRunner):
    def make_requests(self, kv_cache_config):
        made = super().make_requests(kv_cache_config)
        return _StaleTables(made.columns, made.block_tables, made.max_model_len)


class _DrawsByRow(Sampler):
    def sample(self, logits, batch):
        if batch.draws is not None:
            keys = batch.draws.keys + np.arange(len(batch.draws.keys), dtype=np.int64)
            batch = evolve(batch, draws=evolve(batch.draws, keys=keys))
        return super().sample(logits, batch)


@broken(
    "draws depend on the row in the batch", "test_a_seed_gives_the_same_answer_whoever_is_beside"
)
class TorchDrawsByRow(TorchModelRunner):
    def make_sampler(self):
        return _DrawsByRow(self.device)


@broken(
    "a method by which a part is replaced is misspelt",
    "test_the_classes_that_it_names_are_there_and_whole",
    suite="PlatformSuite",
)
class TorchMisspelt(TorchModelRunner):
    def make_smapler(self):
        return _DrawsByRow(self.device)


class _LastChunkOnly(Pooling):
    def pool(self, rows, hidden):
        for span in () if rows is None else rows.spans:
            if span.count:
                span.state.pooled = None
        return super().pool(rows, hidden)


@broken(
    "the mean of a prompt in chunks is of its last chunk",
    "test_a_vector_is_of_the_models_own_states[mean]",
)
class TorchPoolsTheLastChunk(TorchModelRunner):
    def __init__(self, context, platform, registry, device):
        super().__init__(context, platform, registry, device)
        self.pooling = _LastChunkOnly(device)


class _Unnormalised(Pooling):
    def take(self, requests, req_ids):
        for req_id in req_ids:
            if req_id in requests.pooling:
                state = requests[req_id]
                state.pooling = evolve(state.pooling, normalize=False)
        return super().take(requests, req_ids)


@broken("normalize is ignored", "test_a_vector_is_of_the_models_own_states[last]")
class TorchUnnormalised(TorchModelRunner):
    def __init__(self, context, platform, registry, device):
        super().__init__(context, platform, registry, device)
        self.pooling = _Unnormalised(device)


class _NoPenalties(Sampler):
    def sample(self, logits, batch):
        return super().sample(logits, evolve(batch, penalties=None))


@broken(
    "penalties are ignored",
    "test_a_parameter_changes_the_choice_as_the_rules_say[frequency_penalty]",
    "test_a_parameter_changes_the_choice_as_the_rules_say[repetition_penalty]",
)
class TorchNoPenalties(TorchModelRunner):
    def make_sampler(self):
        return _NoPenalties(self.device)


@broken(
    "every rank loads the shards of the first",
    "test_two_that_share_each_layer_give_the_same_answer",
)
class TorchShardsOfTheFirst(TorchModelRunner):
    def load_weights(self, model):
        slots, load = model.weight_slots(), model.load_weight

        def load_weight(name, tensor):
            for axis, held in enumerate(slots[name].held):
                tensor = tensor.roll(held.start or 0, axis)
            load(name, tensor)

        model.load_weight = load_weight
        super().load_weights(model)


LIVES = []


@broken(
    "shutdown keeps weights and cache, and no probe counts them",
    "test_memory_is_back_to_the_baseline_after_every_life",
    suite="PlatformSuite",
)
class TorchFreesNothing(CpuWorker):
    def initialize_from_config(self, kv_cache_config):
        super().initialize_from_config(kv_cache_config)
        LIVES.append(self.get_model_runner().kv_cache)
