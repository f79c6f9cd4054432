"""What the contracts promise by themselves: no silent answers, sizes by the formula."""

from __future__ import annotations

import inspect
from types import MappingProxyType

import pytest
from attrs import evolve
from hardpoint.capabilities import NOT_YET, SINCE, YES, Capability
from hardpoint.errors import UnsupportedError
from hardpoint.executor import Executor
from hardpoint.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheKind, KVCacheSpec
from hardpoint.model_runner import ModelRunner
from hardpoint.platform import Platform
from hardpoint.records import Limits, Placement, Verdict
from hardpoint.worker import Worker

CONTRACTS = (Platform, Executor, Worker, ModelRunner)


class Plain(Platform):
    """Only what a platform must say."""

    name = "plain"
    capabilities = MappingProxyType({Capability.LOGPROBS: YES})

    def probe(self):
        return Verdict(available=True, reason="always")

    def limits(self, config):
        return Limits(dtypes=("float32",), default_dtype="float32")

    def placement(self, config):
        return Placement()


@pytest.mark.parametrize("name", ["is_sleep_available", "capabilites", "worker_cls", "torch"])
def test_a_misspelt_attribute_of_a_platform_is_an_error_never_a_no(name):
    with pytest.raises(AttributeError, match=name):
        getattr(Plain(), name)


def test_what_a_platform_does_not_declare_is_not_yet_and_refused_by_name():
    platform = Plain()
    platform.require(Capability.LOGPROBS)
    assert platform.support(Capability.SLEEP) is NOT_YET
    with pytest.raises(UnsupportedError, match="platform 'plain' does not support sleep and wake"):
        platform.require(Capability.SLEEP)
    assert set(SINCE) == set(Capability)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_contract_cannot_be_built_incomplete(contract):
    assert contract.__abstractmethods__
    with pytest.raises(TypeError, match="abstract"):
        contract()


@pytest.mark.parametrize("contract", CONTRACTS)
def test_every_public_method_of_a_contract_says_what_it_does(contract):
    methods = {
        name: each
        for kind in contract.__mro__
        for name, each in vars(kind).items()
        if kind.__module__.startswith("hardpoint.") and not name.startswith("_")
    }
    public = {n: m for n, m in methods.items() if inspect.isfunction(m) or isinstance(m, property)}
    assert len(public) > 5
    for name, method in public.items():
        assert method.__doc__, f"{contract.__name__}.{name} says nothing"


def test_a_page_has_the_bytes_of_the_formula_unless_the_worker_says_otherwise():
    layer = KVCacheSpec(
        block_size=16, num_kv_heads=3, head_size_k=64, head_size_v=64, dtype="float32"
    )
    assert layer.page_bytes == 24_576
    assert 30 * layer.page_bytes == 46_080 * 16
    assert evolve(layer, dtype="bfloat16", page_bytes=30_000).page_bytes == 30_000
    own = KVCacheSpec(
        block_size=16, num_kv_heads=1, head_size_k=8, head_size_v=8, dtype="bfloat16",
        kind="compressed", follows=KVCacheKind.SLIDING, window=64, extra={"acme": (1, 2)},
    )  # fmt: skip
    assert (own.page_bytes, own.kind, own.extra) == (512, "compressed", {"acme": (1, 2)})


def test_the_engines_block_covers_every_groups_block():
    layer = KVCacheSpec(
        block_size=16, num_kv_heads=1, head_size_k=8, head_size_v=8, dtype="float32"
    )
    groups = [KVCacheGroup(layers=(str(n),), spec=evolve(layer, block_size=n)) for n in (16, 24)]
    assert KVCacheConfig(num_blocks=2, groups=tuple(groups), tensors=()).block_size == 48
