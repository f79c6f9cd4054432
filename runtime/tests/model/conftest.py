"""Tiny Llama checkpoints made by transformers, and a step driver that needs no runner."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from attrs import frozen
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheTensor
from hardpoint_runtime.attention.builder import AttentionMetadataBuilder
from hardpoint_runtime.device import HostDeviceOps
from hardpoint_runtime.forward_context import ForwardContext
from hardpoint_runtime.memory.kv_cache import KVCache
from hardpoint_runtime.models import build_model
from hardpoint_runtime.operations import Operations


@frozen(kw_only=True)
class Row:
    """One request's part of a step: the tokens to compute, how many were computed, its blocks."""

    tokens: Sequence[int]
    computed: int
    blocks: Sequence[int]


class Steps:
    """Runs steps of a model over its own cache, as a runner would."""

    def __init__(self, model, *, block_size=16, num_blocks=40, device=None, kv_dtype="float32"):
        self.model = model
        self.block_size = block_size
        self.device = device or HostDeviceOps()
        self.cache = KVCache.allocate(
            plan_of(model.kv_cache_spec(block_size, kv_dtype), num_blocks), self.device
        )
        self.builder = AttentionMetadataBuilder(self.device, block_size)
        self.cancelled = lambda: False

    def metadata(self, rows, *, pad_rows=0, pad_tokens=0):
        """Return the metadata of ``rows``, with inert padding behind them."""
        starts, lens, positions, slots = [0], [], [], []
        for row in rows:
            starts.append(starts[-1] + len(row.tokens))
            lens.append(row.computed + len(row.tokens))
            for position in range(row.computed, lens[-1]):
                block = row.blocks[position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
                positions.append(position)
        tokens = starts[-1]
        return self.builder.build(
            query_start=starts + [tokens] * pad_rows,
            seq_lens=lens + [0] * pad_rows,
            block_table=[list(row.blocks) for row in rows] + [[]] * pad_rows,
            slots=slots + [-1] * pad_tokens,
            positions=positions + [0] * pad_tokens,
            num_reqs=len(rows),
            num_tokens=tokens,
        )

    def context(self, metadata):
        return ForwardContext(
            attention=dict.fromkeys(self.cache.layers, metadata),
            kv_caches=self.cache.layers,
            cancelled=self.cancelled,
        )

    def logits(self, rows, *, pad_rows=0, pad_tokens=0):
        """Return one logits tensor [tokens, V] a row."""
        metadata = self.metadata(rows, pad_rows=pad_rows, pad_tokens=pad_tokens)
        ids = [token for row in rows for token in row.tokens] + [0] * pad_tokens
        with self.device.inference():
            hidden = self.model(
                self.device.to_device(ids, torch.int64), metadata.positions, self.context(metadata)
            )
            logits = self.device.to_host(self.model.compute_logits(hidden))
        starts = metadata.query_start
        return [logits[a:b] for a, b in pairwise(starts)][: len(rows)]


def plan_of(specs, num_blocks):
    """Return a plan with one buffer a layer."""
    spec = next(iter(specs.values()))
    return KVCacheConfig(
        num_blocks=num_blocks,
        groups=(KVCacheGroup(layers=tuple(specs), spec=spec),),
        tensors=tuple(
            KVCacheTensor(num_bytes=num_blocks * spec.page_bytes, layers=(layer,))
            for layer in specs
        ),
    )


def describe(config, architecture="LlamaForCausalLM"):
    """Return the description of a transformers configuration, as the reader of files would."""
    return ModelDescription(
        path="tiny",
        format="safetensors",
        architecture=architecture,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        stored_dtype="float32",
        hf_config=config.to_dict(),
    )


def tiny_reference(**changes):
    """Return a small random Llama of transformers, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    values = {
        "vocab_size": 131,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(**(values | changes))).eval()


def loaded(reference, *, operations=None, device=None, dtype=torch.float32):
    """Return our model with the weights of ``reference``."""
    device = device or HostDeviceOps()
    model = build_model(describe(reference.config), operations or Operations(), device, dtype)
    state = reference.state_dict()
    for name in model.weight_shapes():
        model.load_weight(name, state[name])
    return model


@pytest.fixture
def kit():
    """The helpers above, for tests that import nothing from each other."""

    class Kit:
        Row = Row
        Steps = Steps
        describe = staticmethod(describe)
        loaded = staticmethod(loaded)
        plan_of = staticmethod(plan_of)
        tiny_reference = staticmethod(tiny_reference)

    return Kit


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors gain nothing from threads that spin."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
