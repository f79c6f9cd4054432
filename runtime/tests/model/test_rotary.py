"""How far each pair turns, beside transformers, for every rule and its options."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hardpoint.checkpoints.fields import Fields
from hardpoint.checkpoints.rotary import read_rotary
from hardpoint.errors import CheckpointError, UnsupportedModelError
from hardpoint_runtime.models.rotary import Rotary, frequencies

HEAD, LONGEST = 32, 128
PAIRS = HEAD // 2
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + pair / 9 for pair in range(PAIRS)],
    "long_factor": [1.0 + pair for pair in range(PAIRS)],
    "original_max_position_embeddings": 32,
}
RULES = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    LLAMA3,
    {**LLAMA3, "original_max_position_embeddings": 4000},
    YARN,
    {**YARN, "truncate": False},
    {**YARN, "beta_fast": 8.0, "beta_slow": 2.0},
    {**YARN, "attention_factor": 0.7},
    {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5},
    LONG,
    {**LONG, "factor": 2.0},
    {**LONG, "attention_factor": 1.3},
    {**LONG, "factor": 0.5},
]


def read(rope, **more):
    fields = Fields(Path("x"), {"rope_parameters": rope, "max_position_embeddings": LONGEST})
    return read_rotary(fields, HEAD, LONGEST, **more)


@pytest.mark.parametrize("rope", RULES, ids=str)
@pytest.mark.parametrize("theta", [1e4, 500.0])
@pytest.mark.parametrize("part", [1.0, 0.5])
def test_frequencies_and_magnitudes_equal_those_of_transformers(rope, theta, part):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {**rope, "rope_theta": theta, "partial_rotary_factor": part}
    for key in ("short_factor", "long_factor"):
        if key in rope:
            rope[key] = rope[key][: int(PAIRS * part)]
    config = LlamaConfig(
        hidden_size=2 * HEAD,
        num_attention_heads=2,
        head_dim=HEAD,
        max_position_embeddings=LONGEST,
        rope_parameters=dict(rope),
    )
    ours = read(rope, partial=True)
    assert ours.size == HEAD * part
    for length in (16, LONGEST):
        expected, magnitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu", seq_len=length)
        torch.testing.assert_close(frequencies(ours, length), expected)
        assert ours.magnitude == pytest.approx(magnitude)


def test_angles_are_multiplied_by_the_magnitude():
    rotary = Rotary(read({**YARN, "attention_factor": 0.5}), LONGEST)
    cos, sin = rotary(torch.tensor([0, 3]))
    assert cos.shape == sin.shape == (2, 1, HEAD)
    assert (cos[0] == 0.5).all()
    assert torch.allclose(cos[1] ** 2 + sin[1] ** 2, torch.tensor(0.25))


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "spiral"}, "rotary scaling 'spiral' is not known; known are default"),
        ({"rope_type": "linear"}, "factor is None"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor is 1.0"),
        ({**LONG, "long_factor": [1.0]}, r"long_factor is \[1.0\]; it must be a list of 16"),
        ({**LONG, "short_factor": [0.0] * PAIRS}, "short_factor is 0.0"),
        ({**YARN, "original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        ({"partial_rotary_factor": 0.5}, "rotated in part"),
        ({"full_attention": {"rope_type": "default"}}, "a table for each of 'full_attention'"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(rope, message):
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read(rope)


def test_a_model_of_two_rules_reads_its_own():
    tables = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert read(tables, layer_type="full_attention").theta == 1e6
    assert read(tables, layer_type="sliding_attention").theta == 1e4
