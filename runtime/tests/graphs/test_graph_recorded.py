"""Recorded graphs on plain functions: the same bits, the same memory, and what is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's habit
from hardpoint_runtime.graphs.errors import GraphCaptureError
from hardpoint_runtime.graphs.out_variants import out_variant
from hardpoint_runtime.graphs.recorded import GraphPool, record_graph
from hardpoint_runtime.graphs.recording import cut, is_recording, opaque, record, require_same
from hardpoint_runtime.graphs.torch_operations import storage_of
from torch.multiprocessing.reductions import StorageWeakRef


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture
def pool():
    return GraphPool(lambda num_bytes: torch.full((num_bytes,), 0xAB, dtype=torch.uint8))


def graph_of(function, pool, **more):
    return record_graph(function, "key", pool, **more)


def checked(function, pool, *inputs, refresh=None):
    """Record ``function()``, change the inputs, replay; return the graph once bits are equal."""
    graph = graph_of(function, pool)
    for _ in range(2):
        for tensor in inputs:
            tensor.copy_(refresh(tensor) if refresh else torch.randn_like(tensor))
        expected = function()
        found = graph.replay()
        assert torch.equal(found, expected)
    return graph


# The same bits.

X = torch.randn(6, 16)
W = torch.randn(32, 16)
IDS = torch.arange(4)

FUNCTIONS = {
    "linear": lambda: F.linear(X, W),
    "linear with bias": lambda: F.linear(X, W, W[:, 0]),
    "norm": lambda: F.rms_norm(X, (16,), W[0], 1e-5),
    "activation": lambda: F.silu(X) * X.sigmoid(),
    "softmax": lambda: (X * 3).softmax(-1),
    "embedding": lambda: F.embedding(IDS, X),
    "types": lambda: X.to(torch.bfloat16).float() + X.double().float(),
    "views": lambda: X.view(3, 32).t().reshape(-1)[4:].unflatten(0, (4, 23)),
    "kept copy": lambda: X.t().contiguous().add_(1),
    "concatenation": lambda: torch.cat([X[:2], X[3:] * 2]),
    "angles": lambda: torch.cat((X.cos(), -X.sin()), -1),
    "attention": lambda: F.scaled_dot_product_attention(
        X.view(1, 2, 3, 16), X.view(1, 1, 6, 16), X.view(1, 1, 6, 16), enable_gqa=True
    ),
    "masked attention": lambda: F.scaled_dot_product_attention(
        X[None, None], X[None, None], X[None, None], attn_mask=torch.ones(6, 6).triu().log()
    ),
    "choice": lambda: torch.where(X > 0, X, 0).masked_fill(X < -1, 5.0),
    "numbers of tensors": lambda: X * 2 + 1 - X / 3,
    "sum": lambda: X.sum(0) + X.mean(1)[:1] + X.amax(),
    "ranks": lambda: X.topk(3)[0] + X.sort(-1)[0][:, :3],
    "fill": lambda: torch.zeros(3).fill_(2) + torch.full((3,), X.shape[0]) + torch.arange(3),
    "gather": lambda: X.index_select(0, IDS) + X[IDS] + X.gather(0, IDS[:, None].expand(4, 16)),
    "a result that grows": lambda: torch.mul(X, 2, out=torch.empty(0)) + 1,
    "nothing": lambda: X,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_replay_gives_the_bits_of_the_function(name, pool):
    checked(FUNCTIONS[name], pool, X)


def test_writes_in_place_are_done_again(pool):
    cache, count = torch.zeros(8, 16), torch.zeros(1)

    def write():
        cache.index_copy_(0, IDS, F.silu(X[:4]))
        cache[5].copy_(X[5])
        count.add_(1)
        return cache * 2

    graph = graph_of(write, pool)
    X.copy_(torch.randn_like(X))
    out = graph.replay()
    assert torch.equal(cache[:4], F.silu(X[:4]))
    assert torch.equal(cache[5], X[5])
    assert torch.equal(out, cache * 2)
    assert count == 2


def test_nested_results_come_back_as_they_were(pool):
    graph = graph_of(lambda: {"a": (X * 2, X), "b": [X.sum(0)], "n": 3}, pool)
    X.copy_(torch.randn_like(X))
    out = graph.replay()
    assert torch.equal(out["a"][0], X * 2)
    assert out["a"][1] is X
    assert torch.equal(out["b"][0], X.sum(0))
    assert out["n"] == 3


@pytest.mark.parametrize("seed", range(20))
def test_random_programs(seed, pool):
    """Chains of operations, views and writes over a growing set of tensors."""
    source = random.Random(seed)
    inputs = [torch.randn(6, 6) for _ in range(2)]
    state = torch.randn(6, 6)

    def step(tensors, choice):
        a, b = tensors[choice[0] % len(tensors)], tensors[choice[1] % len(tensors)]
        return [
            lambda: a + b,
            lambda: a @ b,
            a.t,
            lambda: a.reshape(3, 12).flip(0).reshape(6, 6),
            lambda: F.silu(a),
            lambda: (a * 0.5).clamp_(-3, 3),
            lambda: torch.cat([a[:3], b[3:]]),
            lambda: a.softmax(-1),
            lambda: state.copy_(a.clamp(-2, 2)) * b,
            lambda: a.topk(6)[0],
        ][choice[2]]()

    program = [(source.randrange(9), source.randrange(9), source.randrange(10)) for _ in range(14)]

    def run():
        tensors = [*inputs, state]
        for choice in program:
            tensors.append(step(tensors, choice))
        return tuple(tensors[-3:])

    graph = graph_of(run, pool)
    for _ in range(3):
        for tensor in inputs:
            tensor.copy_(torch.randn_like(tensor))
        before = state.clone()
        expected = [tensor.clone() for tensor in run()]
        written = state.clone()
        state.copy_(before)
        found = graph.replay()
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(state, written, rtol=0, atol=0, equal_nan=True)


# The same memory.


def test_the_result_is_where_it_was_and_valid_after_each_replay(pool):
    graph = graph_of(lambda: F.linear(X, W) + 1, pool)
    places = set()
    for _ in range(3):
        X.copy_(torch.randn_like(X))
        out = graph.replay()
        places.add(out.data_ptr())
        assert torch.equal(out, F.linear(X, W) + 1)
    assert places == {graph.output.data_ptr()}


def test_memory_serves_the_next_tensor_and_the_next_graph(pool):
    big = torch.randn(1000)

    def chain(rows):
        def run():
            x = big[:rows]
            for _ in range(20):
                x = x * 1.5
            return x

        return run

    first = graph_of(chain(1000), pool)
    assert len(pool.blocks) == 2
    assert pool.num_bytes == 2 * 4000
    second = graph_of(chain(500), pool)
    assert pool.num_bytes == 2 * 4000
    for graph, rows in ((first, 1000), (second, 500), (first, 1000)):
        big.copy_(torch.randn(1000))
        assert torch.equal(graph.replay(), chain(rows)())


def test_results_and_what_is_read_late_keep_their_memory(pool):
    def run():
        early = X * 2
        x = X
        for _ in range(6):
            x = x + 1
        return x, x * early, early

    graph = graph_of(run, pool)
    X.copy_(torch.randn_like(X))
    for one, other in zip(graph.replay(), run(), strict=True):
        assert torch.equal(one, other)


def test_what_nobody_reads_is_not_done(pool):
    def run():
        _ = F.linear(X, W).softmax(-1)
        values, _ = X.topk(2)
        return values

    assert len(graph_of(run, pool).work) == 1


def test_views_and_allocations_cost_nothing(pool):
    def run():
        out = torch.empty(6, 16)
        return out.copy_(X.view(16, 6).t().view(-1).view(6, 16)).view(-1)

    def plain():
        return X.view(3, 32)[1:].t()

    X.copy_(torch.randn_like(X))
    assert len(graph_of(plain, pool).work) == 0
    assert len(graph_of(lambda: torch.empty(6, 16).copy_(X).view(-1), pool).work) == 1


def test_most_operations_write_where_their_result_belongs():
    aten = torch.ops.aten
    for operation in (aten.mm.default, aten.mul.Tensor, aten.mul.Scalar, aten.cat.default,
                      aten.pow.Tensor_Scalar, aten.mean.dim, aten.zeros.default, aten.silu.default,
                      aten.index.Tensor, aten.index_select.default):  # fmt: skip
        assert out_variant(operation) is not None, operation
    assert out_variant(aten.add_.Tensor) is None
    assert out_variant(aten._scaled_dot_product_flash_attention_for_cpu.default) is None


def test_a_recording_holds_no_more_memory_than_the_function(pool):
    """What the function drops is gone at once, and no later tensor is taken for it."""

    def run():
        x = X
        for _ in range(50):
            dropped = x
            x = x * 1.01
            gone = StorageWeakRef(dropped.untyped_storage())
            del dropped
            assert gone.expired() or gone.cdata == storage_of(X)
        return x

    checked(run, pool, X)
    assert len(pool.blocks) == 2


# What is refused.

REFUSED = {
    "item": (X[0, 0].item, "the host reads a tensor"),
    "condition": (lambda: 1 if X[0, 0] > 0 else 2, "the host reads a tensor"),
    "float": (lambda: float(X[0, 0]), "the host reads a tensor"),
    "index": (lambda: [1, 2, 3][IDS[1]], "the host reads a tensor"),
    "tolist": (X.tolist, r"the host reads a tensor \(Tensor.tolist\)"),
    "numpy": (X.numpy, "the host reads a tensor"),
    "array": (lambda: np.asarray(X), "the host reads a tensor"),
    "equal": (lambda: torch.equal(X, X), "the host reads a tensor"),
    "print": (lambda: f"{X[0, 0]}", "the host reads a tensor"),
    "nonzero": (X.nonzero, "the shape of a result depends on data"),
    "where": (lambda: torch.where(X > 0), "the shape of a result depends on data"),
    "mask": (lambda: X[X > 0], "the shape of a result depends on data"),
    "masked select": (lambda: X.masked_select(X > 0), "the shape of a result depends on data"),
    "masked write": (lambda: X.index_put_((X > 0,), X[0, 0]), "the shape of a result depends on"),
    "unique": (X.unique, "the shape of a result depends on data"),
    "repeats": (lambda: X.repeat_interleave(IDS.new_ones(6), 0), "shape of a result depends on"),
    "rand": (lambda: torch.rand(3), "random numbers are drawn"),
    "normal": (lambda: torch.empty(3).normal_(), "random numbers are drawn"),
    "dropout": (lambda: F.dropout(X, 0.5), "random numbers are drawn"),
    "multinomial": (lambda: X.softmax(-1).multinomial(1), "random numbers are drawn"),
    "tensor": (lambda: X + torch.tensor(3.0), "values of the host become a tensor"),
    "from numpy": (lambda: X + torch.from_numpy(np.ones(16, np.float32)), "values of the host"),
    "turned in place": ((X + 1).t_, "changes its shape in place"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_work_that_would_not_be_the_same_again_is_a_named_error(name, pool):
    function, message = REFUSED[name]
    with pytest.raises(GraphCaptureError, match=message):
        graph_of(function, pool)
    assert not is_recording()
    assert torch.rand(1).item() >= 0  # and nothing is refused afterwards


def test_attention_without_dropout_draws_nothing(pool):
    q = X[None, None]
    checked(lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.0), pool, X)
    with pytest.raises(GraphCaptureError, match="random numbers are drawn"):
        graph_of(lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), pool)


def test_a_repeat_of_known_size_is_recorded(pool):
    counts = torch.tensor([2, 0, 1])
    checked(lambda: X[:3].repeat_interleave(counts, 0, output_size=3), pool, X)


def test_an_error_of_the_function_is_its_own(pool):
    with pytest.raises(ZeroDivisionError):
        graph_of(lambda: X * (1 // 0), pool)
    assert not is_recording()


# Work that torch does not see.


def test_an_opaque_call_is_one_operation(pool):
    calls = []

    def collective(x):
        calls.append(x)
        return torch.from_numpy(np.asarray(x) * 3)  # what a recording would refuse

    def run():
        return opaque(collective, X * 2) + 1

    graph = checked(run, pool, X)
    assert len(graph.work) == 3
    before = len(calls)
    graph.replay()
    assert len(calls) == before + 1


def test_an_opaque_call_may_give_back_its_argument(pool):
    def in_place(x):
        x.mul_(2)
        return x

    checked(lambda: opaque(in_place, X + 1) * 3, pool, X)


def test_outside_a_recording_both_just_call():
    assert opaque(lambda x: x + 1, 2) == 3
    assert cut(lambda x: x + 1, 2) == 3


def test_a_cut_is_no_cut_in_a_graph_of_one_piece(pool):
    checked(lambda: cut(torch.neg, X) + 1, pool, X)
    recording = record(lambda: cut(torch.neg, X) + 1, cuts=True)
    assert [entry.eager for entry in recording.entries] == [True, False]


# Rehearsals.


def test_a_rehearsal_that_does_the_same_is_content(pool):
    graph_of(lambda: X * 2 + 1, pool, rehearsal=lambda: X * 2 + 1)


@pytest.mark.parametrize(
    ("rehearsal", "difference"),
    [
        (lambda: X * 3 + 1, "operation 0, aten.mul.Tensor, gets 2, then 3"),
        (lambda: X[:5] * 2 + 1, r"shape \(6, 16\), .*, then a tensor of shape \(5, 16\)"),
        (lambda: X * 2 - 1, "operation 1 is aten.add.Tensor, then aten.sub.Tensor"),
        (lambda: X * 2, "2 operations, then 1"),
        (lambda: X.clone() * 2 + 1, "operation 0 is aten.mul.Tensor, then aten.clone.default"),
        (lambda: W[:6] * 2 + 1, "of memory 0x"),
    ],
)  # fmt: skip
def test_a_rehearsal_that_differs_is_a_named_error(rehearsal, difference, pool):
    with pytest.raises(GraphCaptureError, match=difference):
        graph_of(lambda: X * 2 + 1, pool, rehearsal=rehearsal)


def test_a_derived_tensor_of_one_batch_is_noticed():
    """What was made outside, for one batch, would be stale at the next replay."""
    derived = [torch.ones(6, 16), torch.ones(6, 16)]
    recordings = [record(lambda mask=mask: X + mask) for mask in derived]
    with pytest.raises(GraphCaptureError, match="memory"):
        require_same(*recordings)
