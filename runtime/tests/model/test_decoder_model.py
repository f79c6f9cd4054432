"""The decoder against transformers, on tiny random Llama checkpoints."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hardpoint.errors import (
    CancelledStepError,
    CheckpointError,
    LifecycleError,
    UnsupportedError,
    UnsupportedModelError,
)
from hardpoint.records import Offer
from hardpoint_runtime import host_linear
from hardpoint_runtime.device import HostDeviceOps
from hardpoint_runtime.forward_context import entered
from hardpoint_runtime.models import build_model
from hardpoint_runtime.models.decoder import DecoderForCausalLM
from hardpoint_runtime.operations import Operations, linear

VARIANTS = {
    "grouped-tied": {},
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "one-key-head": {"num_key_value_heads": 1},
    "all-key-heads": {"num_key_value_heads": 6},
    "wide-heads": {"head_dim": 32},
    "other-base": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "other-eps": {"rms_norm_eps": 1e-2},
}
TOKENS = torch.tensor([(7 * i * i + 3 * i + 5) % 131 for i in range(90)])


def expected(reference, tokens):
    with torch.inference_mode():
        return reference(tokens[None]).logits[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(kit, variant):
    reference = kit.tiny_reference(**VARIANTS[variant])
    if variant == "biases":
        for name, parameter in reference.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
    steps = kit.Steps(kit.loaded(reference))
    want = expected(reference, TOKENS)
    blocks = [9, 2, 30, 4, 17, 1]
    ids = TOKENS.tolist()
    whole = steps.logits([kit.Row(tokens=ids[:70], computed=0, blocks=blocks)])[0]
    chunk = steps.logits([kit.Row(tokens=ids[70:85], computed=70, blocks=blocks)])[0]
    ones = [
        steps.logits([kit.Row(tokens=[ids[at]], computed=at, blocks=blocks)])[0]
        for at in range(85, 90)
    ]
    got = torch.cat([whole, chunk, *ones])
    assert (got - want).abs().max() < 1e-3
    assert want.abs().max() > 1, "logits near zero would agree by themselves"


@pytest.mark.parametrize("block_size", [1, 16, 32, 128])
def test_a_mixed_batch_equals_each_request_alone(kit, block_size):
    reference = kit.tiny_reference()
    steps = kit.Steps(kit.loaded(reference), block_size=block_size, num_blocks=200)
    texts = [TOKENS[a : a + 40] for a in (0, 11, 29, 50)]
    count = -(-40 // block_size)
    blocks = [list(range(1 + n, 1 + n + 4 * count, 4)) for n in range(4)]
    done = [0, 0, 0, 0]
    for cuts in ([30, 1, 17, 3], [1, 5, 1, 20], [1, 34, 22, 1], [8, 0, 0, 16]):
        rows = [
            (
                n,
                kit.Row(
                    tokens=texts[n][done[n] : done[n] + c].tolist(),
                    computed=done[n],
                    blocks=blocks[n],
                ),
            )
            for n, c in enumerate(cuts)
            if c
        ]
        outputs = steps.logits([row for _, row in rows], pad_rows=2, pad_tokens=3)
        for (n, row), got in zip(rows, outputs, strict=True):
            want = expected(reference, texts[n])[row.computed : row.computed + len(row.tokens)]
            assert (got - want).abs().max() < 1e-3
            done[n] += len(row.tokens)
    assert done == [40, 40, 40, 40]


@pytest.mark.parametrize("wanted", [[], [12], [0, 5, 12]])
def test_only_the_rows_that_are_asked_for_are_computed_to_the_end(kit, wanted):
    seen = []

    def counting(x, weight, bias):
        seen.append(x.shape[0])
        return linear(x, weight, bias)

    reference = kit.tiny_reference()
    model = kit.loaded(reference, operations=Operations(linear=counting))
    steps = kit.Steps(model)
    metadata = steps.metadata([kit.Row(tokens=TOKENS[:13].tolist(), computed=0, blocks=[1])])
    rows = torch.tensor(wanted, dtype=torch.int64)
    with steps.device.inference():
        hidden = model(TOKENS[:13], metadata.positions, steps.context(metadata), rows)
        layers = seen.copy()
        logits = model.compute_logits(hidden)
    assert torch.allclose(logits, expected(reference, TOKENS[:13])[rows], atol=1e-4)
    assert layers[-4:] == [13, *[len(wanted)] * 3]  # qkv of the last layer, then out and the MLP
    assert set(layers[:-3]) == {13}


def test_bfloat16_logits_stay_near_transformers(kit):
    reference = kit.tiny_reference(initializer_range=0.1)
    operations = Operations(linear=host_linear.linear)
    model = kit.loaded(reference, operations=operations, dtype=torch.bfloat16)
    steps = kit.Steps(model, kv_dtype="bfloat16")
    got = steps.logits([kit.Row(tokens=TOKENS[:60].tolist(), computed=0, blocks=[1, 2, 3, 4])])[0]
    want = expected(reference, TOKENS[:60])
    assert got.dtype == torch.float32
    assert (got - want).abs().max() < 5e-2


def test_nan_left_in_the_cache_does_not_reach_the_logits(kit):
    steps = kit.Steps(kit.loaded(kit.tiny_reference()))
    for layer in steps.cache.layers.values():
        layer.key.fill_(torch.nan)
        layer.value.fill_(torch.nan)
    row = kit.Row(tokens=TOKENS[:19].tolist(), computed=0, blocks=[3, 4])
    after = kit.Row(tokens=TOKENS[19:20].tolist(), computed=19, blocks=[3, 4])
    for rows in ([row], [after]):
        assert torch.isfinite(steps.logits(rows, pad_rows=1, pad_tokens=4)[0]).all()


def test_the_context_serves_a_model_that_gets_no_step(kit):
    steps = kit.Steps(kit.loaded(kit.tiny_reference()))
    rows = [kit.Row(tokens=TOKENS[:9].tolist(), computed=0, blocks=[1])]
    metadata = steps.metadata(rows)
    with torch.inference_mode():
        given = steps.model(TOKENS[:9], metadata.positions, steps.context(metadata))
        with entered(steps.context(metadata)):
            found = steps.model(TOKENS[:9], metadata.positions)
        assert torch.equal(given, found)
        with pytest.raises(LifecycleError, match="no forward context"):
            steps.model(TOKENS[:9], metadata.positions)


def test_a_cancelled_step_ends_between_layers(kit):
    steps = kit.Steps(kit.loaded(kit.tiny_reference()))
    asked = []
    steps.cancelled = lambda: asked.append(1) is None and len(asked) == 2
    with pytest.raises(CancelledStepError):
        steps.logits([kit.Row(tokens=[1, 2, 3], computed=0, blocks=[1])])
    written = [bool(c.key[1].any()) for c in steps.cache.layers.values()]
    assert written == [True, False, False]


def test_a_model_calls_its_operations_and_nothing_else(kit):
    """Counts of one decode step: what a plugin replaces is what runs."""
    counts = dict.fromkeys(("linear", "rms_norm", "add_rms_norm", "rotary", "silu_and_mul"), 0)
    plain = Operations()

    def counting(name):
        def call(*args):
            counts[name] += 1
            return getattr(plain, name)(*args)

        return call

    operations = evolve(plain, **{name: counting(name) for name in counts})
    steps = kit.Steps(kit.loaded(kit.tiny_reference(), operations=operations))
    steps.logits([kit.Row(tokens=[3], computed=0, blocks=[1])])
    layers = 3
    assert counts == {
        "linear": 4 * layers + 1,
        "rms_norm": 1,
        "add_rms_norm": 2 * layers,
        "rotary": layers,
        "silu_and_mul": layers,
    }


def test_construction_allocates_nothing_and_tied_weights_are_one(kit):
    reference = kit.tiny_reference()
    model = build_model(
        kit.describe(reference.config), Operations(), HostDeviceOps(), torch.bfloat16
    )
    assert model.head.weight is model.embed.weight
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert held == 2 * sum(p.numel() for p in reference.parameters())
    assert all(not p.requires_grad and p.device.type == "cpu" for p in model.parameters())


def test_the_weights_that_a_model_needs_are_those_of_its_checkpoint(kit):
    for changes in ({}, {"tie_word_embeddings": False}, {"attention_bias": True, "mlp_bias": True}):
        reference = kit.tiny_reference(**changes)
        model = kit.loaded(reference)
        shapes = {name: tuple(t.shape) for name, t in reference.state_dict().items()}
        if model.tied:
            del shapes["lm_head.weight"]
        assert model.weight_shapes() == shapes


def test_a_weight_of_another_name_or_shape_is_refused(kit):
    model = kit.loaded(kit.tiny_reference())
    with pytest.raises(CheckpointError, match=r"'model\.layers\.9\.x'"):
        model.load_weight("model.layers.9.x", torch.zeros(1))
    with pytest.raises(CheckpointError, match=r"k_proj.*\(31, 48\).*\(32, 48\)"):
        model.load_weight("model.layers.0.self_attn.k_proj.weight", torch.zeros(31, 48))


def test_a_weight_fills_only_its_own_part(kit):
    model = kit.loaded(kit.tiny_reference())
    fused = model.layers[1].attention.qkv.weight
    before = fused.clone()
    model.load_weight("model.layers.1.self_attn.k_proj.weight", torch.full((32, 48), 9.0))
    assert (fused[96:128] == 9).all()
    assert torch.equal(fused[:96], before[:96])
    assert torch.equal(fused[128:], before[128:])


def test_cache_specs_name_the_layers(kit):
    model = kit.loaded(kit.tiny_reference())
    specs = model.kv_cache_spec(16, "bfloat16")
    assert list(specs) == [f"model.layers.{n}.self_attn" for n in range(3)]
    assert {spec.page_bytes for spec in specs.values()} == {2 * 16 * (16 + 16) * 2}


def test_an_unknown_architecture_lists_the_known_ones(kit):
    description = kit.describe(kit.tiny_reference().config, "AcmeForCausalLM")
    with pytest.raises(UnsupportedModelError, match=r"AcmeForCausalLM.*LlamaForCausalLM"):
        build_model(description, Operations(), HostDeviceOps(), torch.float32)


class Doubled(DecoderForCausalLM):
    """A small variation, as a plugin would write it."""

    @classmethod
    def read_config(cls, description):
        config = super().read_config(description)
        return evolve(config, norm_eps=2 * config.norm_eps)


def test_a_plugins_architecture_is_built(kit):
    class Plugins:
        def offers(self, hook, platform_name, description=None):
            reference = f"{__name__}:Doubled"
            return {"LlamaForCausalLM": Offer(name="LlamaForCausalLM", reference=reference)}

        def candidates(self, hook):
            return []

    description = kit.describe(kit.tiny_reference().config)
    model = build_model(
        description, Operations(), HostDeviceOps(), torch.float32, registry=Plugins()
    )
    assert type(model) is Doubled
    assert model.norm.eps == 2 * description.hf_config["rms_norm_eps"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "relu"}, "relu"),
        ({"rope_parameters": {"rope_type": "spiral", "factor": 2.0}}, "rotary scaling 'spiral'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "mrope"}}, "rotary scaling 'mrope'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rotated in part"),
        ({"rope_parameters": {"full_attention": {}}}, "a table for each of 'full_attention'"),
    ],
    ids=str,
)
def test_variants_that_are_not_known_are_named(kit, changes, named):
    description = kit.describe(kit.tiny_reference().config)
    wrong = evolve(description, hf_config={**description.hf_config, **changes})
    with pytest.raises(UnsupportedModelError, match=named):
        build_model(wrong, Operations(), HostDeviceOps(), torch.float32)


def test_heads_that_do_not_divide_are_refused(kit):
    description = evolve(kit.describe(kit.tiny_reference().config), num_kv_heads=4)
    with pytest.raises(UnsupportedError, match="6 query heads over 4"):
        build_model(description, Operations(), HostDeviceOps(), torch.float32)
