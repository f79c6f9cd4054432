"""Named operations: the built-in ones by formula, and how they are resolved."""

from __future__ import annotations

import logging

import pytest
import torch
from attrs import evolve
from hardpoint.errors import PluginError
from hardpoint.offers import chosen_offers
from hardpoint.records import Operation
from hardpoint.references import UnresolvedReferenceError
from hardpoint_runtime import host_linear, operations
from hardpoint_runtime.models import attention_needs
from hardpoint_runtime.operations import NAMES, Operations, resolve

DESCRIPTION = {"dtype": "float32", "head_size": 64}


class Plugins:
    """Offers of one plugin, chosen by core's own rule."""

    def __init__(self, *offers):
        self.found = offers

    def candidates(self, hook):
        return [(None, offer) for offer in self.found]

    def offers(self, hook, platform_name, description=None):
        return chosen_offers(hook, platform_name, self.candidates(hook), description)


def doubled(x, weight, eps):
    return x * 2


def tripled(x, weight, eps):
    return x * 3


DOUBLED = Operation(name="rms_norm", reference=f"{__name__}:doubled", platform="acme")
TRIPLED = Operation(name="rms_norm", reference=f"{__name__}:tripled")


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """References name this very module, however pytest imported it."""
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or _here())


def _here():
    import types

    module = types.ModuleType(__name__)
    module.doubled, module.tripled = doubled, tripled
    return module


def test_without_offers_everything_is_built_in():
    found = resolve(None, "acme", DESCRIPTION)
    assert evolve(found, choices=()) == Operations()
    assert [(choice.name, choice.reference) for choice in found.choices] == [
        (name, "built-in") for name in NAMES
    ]


def test_the_platforms_own_wins_then_any_then_built_in():
    x = torch.ones(2, 4)
    both = resolve(Plugins(DOUBLED, TRIPLED), "acme", DESCRIPTION)
    assert both.rms_norm(x, x[0], 0.0)[0, 0] == 2
    assert resolve(Plugins(DOUBLED, TRIPLED), "other", DESCRIPTION).rms_norm(x, x, 0.0)[0, 0] == 3
    assert resolve(Plugins(DOUBLED), "other", DESCRIPTION).rms_norm is operations.rms_norm
    assert both.linear is operations.linear
    (choice,) = [each for each in both.choices if each.name == "rms_norm"]
    assert choice.reference == DOUBLED.reference


def test_an_operation_that_cannot_serve_is_passed_over_and_says_so(caplog):
    picky = evolve(DOUBLED, supports=lambda d: f"head size {d['head_size']} is not 128")
    with caplog.at_level(logging.INFO, "hardpoint.operations"):
        found = resolve(Plugins(picky, TRIPLED), "acme", DESCRIPTION)
    (choice,) = [each for each in found.choices if each.name == "rms_norm"]
    assert choice.reference == TRIPLED.reference
    assert choice.passed_over == (f"{DOUBLED.reference}: head size 64 is not 128",)
    assert "head size 64 is not 128" in caplog.text


def test_the_reason_against_every_offer_is_reported(caplog):
    """By what is asked of them: sizes, types, windows."""
    needs = {**DESCRIPTION, "dtype": "float32", "block_size": 16, "window": True}
    against = {
        "head_size": lambda d: f"head size {d['head_size']} is not 128",
        "dtype": lambda d: f"{d['dtype']} is not supported",
        "block_size": lambda d: f"blocks of {d['block_size']} tokens, not 64",
        "window": lambda d: "no windows" if d["window"] else None,
    }
    offers = [
        evolve(DOUBLED, reference=f"{__name__}:{name}", supports=supports)
        for name, supports in against.items()
    ]
    elsewhere = evolve(DOUBLED, platform="other")
    with caplog.at_level(logging.INFO, "hardpoint.operations"):
        found = resolve(Plugins(*offers, elsewhere), "acme", needs)
    (choice,) = [each for each in found.choices if each.name == "rms_norm"]
    assert choice.reference == "built-in"
    expected = [f"{__name__}:{name}: {supports(needs)}" for name, supports in against.items()]
    assert list(choice.passed_over)[:4] == expected
    assert all(reason in caplog.text for reason in expected)


def test_an_operation_that_no_model_calls_is_an_error():
    with pytest.raises(PluginError, match=r"'rms_nrom'.*rms_norm"):
        resolve(Plugins(evolve(DOUBLED, name="rms_nrom")), "acme", DESCRIPTION)


def test_a_reference_that_leads_nowhere_is_an_error():
    broken = evolve(DOUBLED, reference="acme_absent:kernel")
    with pytest.raises(UnresolvedReferenceError, match="acme_absent"):
        resolve(Plugins(broken), "acme", DESCRIPTION)


def test_norms_by_formula():
    x, weight = torch.randn(5, 48), torch.randn(48)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(operations.rms_norm(x, weight, 1e-5), expected)
    residual = torch.randn(5, 48)
    total = x + residual
    normed, kept = operations.add_rms_norm(x, residual.clone(), weight, 1e-5)
    torch.testing.assert_close(kept, total)
    torch.testing.assert_close(normed, operations.rms_norm(total, weight, 1e-5))


def test_rotary_turns_pairs():
    x, head = torch.randn(3, 2, 8), 8
    angles = torch.randn(3, 1, head // 2)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    turned = operations.rotary(x, cos, sin)
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(()), angles)
    torch.testing.assert_close(turned, torch.cat([pairs.real, pairs.imag], -1))


def test_gated_activation_by_formula():
    x = torch.randn(3, 20)
    expected = x[:, :10] * torch.sigmoid(x[:, :10]) * x[:, 10:]
    torch.testing.assert_close(operations.silu_and_mul(x), expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 16, 96, 97])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_host_linear_equals_the_plain_one(rows, dtype, bias, threads, monkeypatch):
    torch.set_num_threads(threads)  # the fixture of this folder puts it back
    monkeypatch.setattr(host_linear, "SLAB", 1000)  # several slabs, the last one smaller
    x, weight = torch.randn(rows, 40).to(dtype), torch.randn(70, 40).to(dtype)
    added = torch.randn(70).to(dtype) if bias else None
    out = host_linear.linear(x, weight, added)
    exact = x.double() @ weight.double().t() + (added.double() if bias else 0)
    assert out.is_contiguous()
    assert out.dtype == dtype
    tolerance = (
        {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.02}
    )
    torch.testing.assert_close(out.double(), exact, **tolerance)


@pytest.mark.parametrize(
    ("architecture", "config", "window", "softcap"),
    [
        ("LlamaForCausalLM", {}, False, False),
        ("MistralForCausalLM", {"sliding_window": 9}, True, False),
        ("MistralForCausalLM", {"sliding_window": None}, False, False),
        ("Gemma2ForCausalLM", {}, True, True),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": None}, True, False),
        ("AcmeForCausalLM", {}, True, True),
    ],
)
def test_what_is_offered_hears_of_windows_and_caps(kit, architecture, config, window, softcap):
    description = kit.describe(kit.tiny_reference().config, architecture)
    described = evolve(description, hf_config=config)
    assert attention_needs(described) == {"window": window, "softcap": softcap}
