"""A model over several ranks: what each holds, and that they compute what one computes."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hardpoint.checkpoints.decoder_tensors import expected_shapes
from hardpoint.errors import CheckpointError, ConfigError, LifecycleError, UnsupportedError
from hardpoint.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheTensor
from hardpoint_runtime.attention.builder import AttentionMetadataBuilder
from hardpoint_runtime.device import HostDeviceOps
from hardpoint_runtime.forward_context import ForwardContext
from hardpoint_runtime.loading.model_loading import check_weights
from hardpoint_runtime.loading.sharded_state import held_tensors
from hardpoint_runtime.memory.kv_cache import KVCache
from hardpoint_runtime.models import build_model
from hardpoint_runtime.operations import Operations
from hardpoint_runtime.parallel.groups import Axis, Topology
from hardpoint_runtime.parallel.pipeline import StageLine
from hardpoint_runtime.parallel.seat import Seat

SEATS = [(2, 1), (3, 1), (6, 1), (1, 2), (1, 3), (2, 2), (3, 3)]
"""(tensor shards, pipeline stages); the model has 6 query and 3 key-value heads, 5 layers."""


def whole_tensor(index, shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(index)
    values = torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.1)
    return (values + (len(shape) == 1)).to(dtype)


def whole_weights(description):
    shapes = expected_shapes(description)
    return {name: whole_tensor(index, shape) for index, (name, shape) in enumerate(shapes.items())}


class Given:
    """Weights by name, as a loader gives them."""

    def __init__(self, tensors):
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def loaded(description, seat=None):
    more = {} if seat is None else {"seat": seat}
    model = build_model(description, Operations(), HostDeviceOps(), torch.float32, **more)
    weights = whole_weights(description)
    for name in check_weights(model, Given(weights)):
        model.load_weight(name, weights[name])
    return model


def seats_of(tensor, pipeline):
    """Return seats that hold their parts and communicate with nobody."""
    topology = Topology(tensor=tensor, pipeline=pipeline)
    return [Seat(topology=topology, rank=rank) for rank in range(topology.size)]


EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "norm_topk_prob": True,
    "mlp_only_layers": [1],
}  # fmt: skip
VARIANTS = {
    "MistralForCausalLM": {"sliding_window": 4},
    "MixtralForCausalLM": {"num_local_experts": 3},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Qwen2MoeForCausalLM": {**EXPERTS, "shared_expert_intermediate_size": 14},
    "Qwen3MoeForCausalLM": EXPERTS,
    "Phi3ForCausalLM": {"partial_rotary_factor": 0.5},
    "GemmaForCausalLM": {},
    "Gemma2ForCausalLM": {"sliding_window": 4},
    "Gemma3ForCausalLM": {"sliding_window": 4},
}
"""Every architecture but Llama, in the same odd shape."""


def varied(description, architecture):
    changes = {"tie_word_embeddings": "Gemma" in architecture, **VARIANTS[architecture]}
    config = {**description.hf_config, **changes}
    return evolve(description, architecture=architecture, hf_config=config)


def tied(description, value):
    return evolve(description, hf_config={**description.hf_config, "tie_word_embeddings": value})


@pytest.mark.parametrize(("tensor", "pipeline"), SEATS)
@pytest.mark.parametrize("tie", [True, False])
def test_the_parts_together_are_the_checkpoint_bit_for_bit(odd_llama, tensor, pipeline, tie):
    require_whole(tied(odd_llama, tie), tensor, pipeline)


@pytest.mark.parametrize(("tensor", "pipeline"), [(3, 1), (6, 2)])
@pytest.mark.parametrize("architecture", VARIANTS)
def test_so_they_are_for_every_architecture(odd_llama, tensor, pipeline, architecture):
    require_whole(varied(odd_llama, architecture), tensor, pipeline)


def require_whole(description, tensor, pipeline):
    """Fail unless each weight is on some ranks, and together there whole."""
    weights = whole_weights(description)
    ramps = {
        name: torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape)
        for name, tensor in weights.items()
    }
    covered = {name: torch.zeros(ramp.shape, dtype=torch.bool) for name, ramp in ramps.items()}
    for seat in seats_of(tensor, pipeline):
        model = build_model(description, Operations(), HostDeviceOps(), torch.float32, seat=seat)
        for name in check_weights(model, Given(weights)):
            model.load_weight(name, ramps[name])
        for name, slot in model.weight_slots().items():
            assert torch.equal(slot.view(), slot.part_of(ramps[name]) + slot.offset), name
            for held in slot.runs or [slot.held or slice(None)]:
                covered[name][held] = True
    assert all(bool(each.all()) for each in covered.values())


@pytest.mark.parametrize("architecture", VARIANTS)
def test_what_a_rank_saves_is_all_it_holds_once(odd_llama, architecture):
    description = varied(odd_llama, architecture)
    for seat in seats_of(3, 2):
        model = build_model(description, Operations(), HostDeviceOps(), torch.float32, seat=seat)
        saved = held_tensors(model).values()
        assert sum(tensor.numel() for tensor in saved) == sum(p.numel() for p in model.parameters())
        for tensor in saved:
            tensor.fill_(7.0)
        assert all(bool((parameter == 7.0).all()) for parameter in model.parameters())


@pytest.mark.parametrize("tensor", [2, 3])
def test_shards_side_by_side_in_the_order_of_ranks_are_the_whole(odd_llama, tensor):
    weights = whole_weights(odd_llama)
    slots = [loaded(odd_llama, seat).weight_slots() for seat in seats_of(tensor, 1)]
    for name, slot in slots[0].items():
        shards = [each[name].view() for each in slots]
        if not slot.held:  # a norm: on every rank
            assert all(torch.equal(shard, weights[name]) for shard in shards)
            continue
        dim = next(d for d in (0, 1) if shards[0].shape[d] != slot.shape[d])
        assert torch.equal(torch.cat(shards, dim), weights[name]), name


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (3, 3)])
def test_each_rank_holds_its_part_only(odd_llama, tensor, pipeline):
    held = []
    for seat in seats_of(tensor, pipeline):
        model = build_model(odd_llama, Operations(), HostDeviceOps(), torch.float32, seat=seat)
        held.append(sum(parameter.numel() for parameter in model.parameters()))
    one = build_model(odd_llama, Operations(), HostDeviceOps(), torch.float32)
    total = sum(parameter.numel() for parameter in one.parameters())
    norms = total // 50  # small, and on every tensor shard
    copies = odd_llama.vocab_size * odd_llama.hidden_size if pipeline > 1 else 0
    assert sum(held) <= total + copies + norms * tensor
    assert max(held) < total


def test_stages_are_consecutive_and_the_last_has_the_tied_embedding(odd_llama):
    names = []
    for seat in seats_of(1, 3):
        model = build_model(odd_llama, Operations(), HostDeviceOps(), torch.float32, seat=seat)
        names.append(list(model.kv_cache_spec(4, "float32")))
        outside = {n for n in model.weight_slots() if not n.startswith("model.layers.")}
        embedding, norm = {"model.embed_tokens.weight"}, {"model.norm.weight"}
        expected = embedding if seat.is_first_stage else set()
        assert outside == (embedding | norm if seat.is_last_stage else expected)
    layers = [[int(name.split(".")[2]) for name in stage] for stage in names]
    assert layers == [[0, 1], [2, 3], [4]]


def test_what_each_rank_keeps_in_its_cache(odd_llama):
    """Two of three key-value heads, then one; the same layers on both."""
    kept = []
    for seat in seats_of(2, 2):
        model = build_model(odd_llama, Operations(), HostDeviceOps(), torch.float32, seat=seat)
        specs = model.kv_cache_spec(4, "float32")
        kept.append((len(specs), {spec.num_kv_heads for spec in specs.values()}))
        page = next(iter(specs.values())).page_bytes
        assert page == 4 * kept[-1][1].copy().pop() * 2 * odd_llama.head_size * 4
    assert kept == [(3, {2}), (3, {1}), (2, {2}), (2, {1})]


# Ranks together compute what one computes.


class Runs:
    """Runs a prefill and decodes on one model, as a runner would."""

    def __init__(self, model, line=None):
        self.model, self.line = model, line
        specs = model.kv_cache_spec(4, "float32")
        plan = KVCacheConfig(
            num_blocks=10,
            groups=(KVCacheGroup(layers=tuple(specs), spec=next(iter(specs.values()))),),
            tensors=tuple(
                KVCacheTensor(num_bytes=10 * spec.page_bytes, layers=(name,))
                for name, spec in specs.items()
            ),
        )
        self.cache = KVCache.allocate(plan, HostDeviceOps())
        self.builder = AttentionMetadataBuilder(HostDeviceOps(), 4)
        self.steps = 0

    def step(self, tokens, computed):
        positions = list(range(computed, computed + len(tokens)))
        metadata = self.builder.build(
            query_start=[0, len(tokens)],
            seq_lens=[computed + len(tokens)],
            block_table=[list(range(1, 9))],
            slots=[4 + position for position in positions],
            positions=positions,
        )
        context = ForwardContext(
            attention=dict.fromkeys(self.cache.layers, metadata),
            kv_caches=self.cache.layers,
            step_id=self.steps,
        )
        self.steps += 1
        asked = (self.model, torch.tensor(tokens), torch.tensor(positions), context)
        with torch.inference_mode():
            hidden = self.model(*asked[1:]) if self.line is None else self.line.run(*asked, None)
            return None if hidden is None else self.model.compute_logits(hidden)

    def run(self):
        """Return the logits [T, V] of a prefill and two decodes; None but on the last stage."""
        logits = [self.step([5, 9, 77, 3, 41, 5], 0), self.step([8], 6), self.step([100], 7)]
        return None if logits[0] is None else torch.cat(logits)


def seated(memory_ranks, tensor, pipeline, world):
    from hardpoint_runtime.parallel.communicator import Meeting
    from hardpoint_runtime.parallel.host import host_communicator

    topology = Topology(tensor=tensor, pipeline=pipeline)
    meeting = Meeting(rank=world.index, rendezvous=memory_ranks.rendezvous, timeout=30.0)
    groups = {}
    for name, axis in (("tensor", Axis.TENSOR), ("pipeline", Axis.PIPELINE)):
        group = topology.group_of(axis, world.index)
        group = evolve(group, index=group.index + 100)  # another than the test's own group
        groups[name] = host_communicator(group, meeting) if len(group.ranks) > 1 else None
    return Seat(topology=topology, rank=world.index, **groups)


@pytest.mark.parametrize(("tensor", "pipeline"), SEATS)
@pytest.mark.parametrize("biases", [False, True])
def test_logits_equal_those_of_one_rank(odd_llama, memory_ranks, failing, tensor, pipeline, biases):
    more = {"attention_bias": biases, "mlp_bias": biases}
    description = evolve(odd_llama, hf_config={**odd_llama.hf_config, **more})
    require_equal(description, memory_ranks, failing, tensor, pipeline)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("architecture", VARIANTS)
def test_so_they_do_for_every_architecture(
    odd_llama, memory_ranks, failing, tensor, pipeline, architecture
):
    description = varied(odd_llama, architecture)
    require_equal(description, memory_ranks, failing, tensor, pipeline)


def require_equal(description, memory_ranks, failing, tensor, pipeline):
    """Fail unless all ranks of the last stage have the logits that one rank has alone."""
    expected = Runs(loaded(description)).run()

    def run(world):
        seat = seated(memory_ranks, tensor, pipeline, world)
        line = StageLine(seat.pipeline, torch.float32, HostDeviceOps()) if seat.pipeline else None
        try:
            return seat.is_last_stage, Runs(loaded(description, seat), line).run()
        finally:
            seat.close()

    found = failing(memory_ranks.run(tensor * pipeline, run))
    logits = [each for is_last, each in found if is_last]
    assert len(logits) == tensor
    assert all(each is None for is_last, each in found if not is_last)
    bound = 1e-4 if tensor > 1 else 1e-5
    for each in logits:
        assert torch.equal(each, logits[0])  # or ranks would sample different tokens
        assert (each - expected).abs().max() < bound
    if tensor == 1:
        assert torch.equal(logits[0], expected)


# What cannot be.


def test_a_size_that_the_heads_do_not_allow(odd_llama):
    with pytest.raises(ConfigError, match="tensor_parallel_size = 4: more ranks than the 3 key"):
        build_model(odd_llama, Operations(), HostDeviceOps(), torch.float32, seat=seats_of(4, 1)[0])


def test_more_stages_than_layers(odd_llama):
    with pytest.raises(ConfigError, match="more stages than the model's 5 layers"):
        build_model(odd_llama, Operations(), HostDeviceOps(), torch.float32, seat=seats_of(1, 6)[0])


def test_a_model_that_is_only_ever_whole(odd_llama, monkeypatch):
    from hardpoint_runtime.models.decoder import DecoderForCausalLM

    monkeypatch.setattr(DecoderForCausalLM, "can_split", False)
    build_model(odd_llama, Operations(), HostDeviceOps(), torch.float32)
    with pytest.raises(UnsupportedError, match="does not support several ranks"):
        build_model(odd_llama, Operations(), HostDeviceOps(), torch.float32, seat=seats_of(2, 1)[0])


def test_stages_refuse_what_is_anothers_work(odd_llama):
    first, last = (
        build_model(odd_llama, Operations(), HostDeviceOps(), torch.float32, seat=seat)
        for seat in seats_of(1, 2)
    )
    with pytest.raises(LifecycleError, match="only the last pipeline stage has logits"):
        first.compute_logits(torch.zeros(1, odd_llama.hidden_size))
    with pytest.raises(LifecycleError, match="needs what the one before carried"):
        last(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), ForwardContext())


@pytest.mark.parametrize(
    "name",
    ["model.layers.5.mlp.up_proj.weight", "model.layers.0.mlp.odd.weight", "model.extra.weight"],
)
def test_a_stage_finds_weights_that_belong_nowhere(odd_llama, name):
    weights = whole_weights(odd_llama)
    weights[name] = torch.zeros(1)
    models = [
        build_model(odd_llama, Operations(), HostDeviceOps(), torch.float32, seat=seat)
        for seat in seats_of(1, 2)
    ]
    refused = []
    for model in models:
        try:
            check_weights(model, Given(weights))
        except CheckpointError as error:
            refused.append(str(error))
    assert refused
    assert all("1 weights have no place in the model" in text for text in refused)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_misses_its_own_weights(odd_llama, stage):
    weights = whole_weights(odd_llama)
    del weights[["model.layers.0.mlp.up_proj.weight", "model.norm.weight"][stage]]
    seat = seats_of(1, 2)[stage]
    model = build_model(odd_llama, Operations(), HostDeviceOps(), torch.float32, seat=seat)
    with pytest.raises(CheckpointError, match="1 weights of the model are missing"):
        check_weights(model, Given(weights))
