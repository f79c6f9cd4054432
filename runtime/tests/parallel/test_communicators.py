"""What every Communicator does, on random tensors, against plain torch."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hardpoint_runtime.parallel import shared_memory
from hardpoint_runtime.parallel.communicator import Meeting, TensorShape
from hardpoint_runtime.parallel.errors import CollectiveMismatchError
from hardpoint_runtime.parallel.groups import Axis, Topology
from hardpoint_runtime.parallel.host import host_communicator

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]
SHAPES = [(1,), (7, 33), (3, 0, 2), (600, 577)]
"""The last takes several turns of a slot."""


@pytest.fixture(autouse=True)
def small_slots(monkeypatch):
    """So that what takes several turns or pieces is small."""
    monkeypatch.setattr(shared_memory, "SLOT", 1 << 16)
    monkeypatch.setattr(shared_memory, "PIECE", 1 << 12)


def random(rank, shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype is torch.int64:
        return torch.randint(-1000, 1000, shape, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_is_the_sum_with_the_same_bits_everywhere(ranks, failing, size, shape, dtype):
    sums = failing(ranks.run(size, lambda c: c.all_reduce(random(c.index, shape, dtype))))
    wide = torch.int64 if dtype is torch.int64 else torch.float64
    expected = sum(random(rank, shape, dtype).to(wide) for rank in range(size))
    for each in sums:
        assert each.dtype == dtype
        assert each.shape == shape
        assert torch.equal(each, sums[0])
        torch.testing.assert_close(each, expected.to(dtype))


def test_sums_of_narrow_numbers_are_rounded_once(ranks, failing):
    # 256 + 1 + 1 in bfloat16: each 1 alone is lost, both together are not
    def given(rank):
        return torch.full((3,), 1.0).index_fill(0, torch.tensor([rank]), 256.0).bfloat16()

    sums = failing(ranks.run(3, lambda c: c.all_reduce(given(c.index))))
    assert [each.tolist() for each in sums] == [[258.0] * 3] * 3


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("lengths", [(2, 2), (3, 1, 2), (4, 0), (5000, 4999, 4999)], ids=str)
def test_all_gather_joins_uneven_parts(any_ranks, failing, dim, lengths):
    def part(rank):
        shape = [3, 5, 2]
        shape[dim] = lengths[rank]
        return random(rank, shape)

    got = failing(any_ranks.run(len(lengths), lambda c: c.all_gather(part(c.index), lengths, dim)))
    expected = torch.cat([part(rank) for rank in range(len(lengths))], dim)
    assert all(torch.equal(each, expected) for each in got)


def test_gather_gives_it_to_one(any_ranks, failing):
    got = failing(any_ranks.run(3, lambda c: c.gather(random(c.index, (2, 4)), [2] * 3, root=1)))
    assert got[0] is None
    assert got[2] is None
    assert torch.equal(got[1], torch.cat([random(rank, (2, 4)) for rank in range(3)]))


@pytest.mark.parametrize("shape", [(5,), (600, 577)], ids=str)
@pytest.mark.parametrize("source", [0, 2])
def test_broadcast(any_ranks, failing, shape, source):
    got = failing(any_ranks.run(3, lambda c: c.broadcast(random(c.index, shape), source)))
    assert all(torch.equal(each, random(source, shape)) for each in got)


def test_all_to_all_transposes(any_ranks, failing):
    got = failing(any_ranks.run(3, lambda c: c.all_to_all(random(c.index, (6, 4)))))
    given = [random(rank, (6, 4)).view(3, 2, 4) for rank in range(3)]
    for rank, each in enumerate(got):
        assert torch.equal(each, torch.cat([part[rank] for part in given]))


def test_a_tensor_that_is_no_single_piece_of_memory(ranks, failing):
    got = failing(ranks.run(2, lambda c: c.all_reduce(random(c.index, (4, 6)).t()[1:])))
    expected = sum(random(rank, (4, 6)).t()[1:] for rank in range(2))
    assert all(torch.equal(each, expected) for each in got)


def test_in_inference_mode_as_models_run(any_ranks, failing):
    def run(communicator):
        with torch.inference_mode():
            first = communicator.all_reduce(random(communicator.index, (4, 4)))
            return communicator.all_reduce(first.clone())

    got = failing(any_ranks.run(2, run))
    assert torch.equal(got[0], 2 * sum(random(rank, (4, 4)) for rank in range(2)))


def test_many_operations_of_all_kinds_stay_in_step(any_ranks, failing):
    def run(communicator):
        seen = []
        for turn in range(30):
            total = communicator.all_reduce(random(communicator.index, (turn + 1, 9), seed=turn))
            parts = communicator.all_gather(total[:, : communicator.index + 1], (1, 2, 3), -1)
            communicator.barrier()
            seen.append(communicator.broadcast(parts.clone(), turn % 3))
        return seen

    first, *others = failing(any_ranks.run(3, run))
    assert len(first) == 30
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


# From one to the next.


def messages(count, rows=40):
    return [
        {"hidden": random(turn, (rows + turn, 17)), "ids": random(turn, (turn,), torch.int64)}
        for turn in range(count)
    ]


def shapes_of(message):
    return {n: TensorShape(shape=tuple(t.shape), dtype=t.dtype) for n, t in message.items()}


@pytest.mark.parametrize("rows", [3, 4000])
def test_named_tensors_arrive_in_order_through_every_member(any_ranks, failing, rows):
    """A chain of three; the longest messages are longer than a ring."""
    sent = messages(6, rows)

    def run(communicator):
        seen, pending = [], []
        for message in sent:
            carried = message
            if communicator.index:
                carried = communicator.receive(shapes_of(message), communicator.index - 1)
                seen.append(carried)
            if communicator.index < 2:
                pending.append(communicator.send(carried, communicator.index + 1))
        for each in pending:
            each.wait()
        communicator.barrier()
        return seen

    _, *received = failing(any_ranks.run(3, run))
    for seen in received:
        for got, message in zip(seen, sent, strict=True):
            assert got.keys() == message.keys()
            assert all(torch.equal(got[name], message[name]) for name in message)


def test_a_stage_does_not_wait_for_the_next_one_to_receive(any_ranks, failing):
    """Two messages are on their way before the receiver looks."""
    message = messages(1)[0]

    def run(communicator):
        if communicator.index == 0:
            pending = [communicator.send(message, 1) for _ in range(2)]
            communicator.barrier()  # the receiver comes here before it receives
            for each in pending:
                each.wait()
            return True
        communicator.barrier()
        got = [communicator.receive(shapes_of(message), 0) for _ in range(2)]
        return all(torch.equal(each["hidden"], message["hidden"]) for each in got)

    assert failing(any_ranks.run(2, run, axis=Axis.PIPELINE)) == [True, True]


# Ranks that disagree.


def test_ranks_that_come_with_different_sizes_find_out(memory_ranks):
    errors = memory_ranks.run(2, lambda c: c.all_reduce(torch.ones(3 + c.index)), timeout=10.0)
    assert any(isinstance(error, CollectiveMismatchError) for error in errors)
    assert any("came with all_reduce of" in str(error) for error in errors)


def test_ranks_that_come_for_different_operations_find_out(memory_ranks):
    def run(communicator):
        if communicator.index:
            return communicator.barrier()
        return communicator.all_reduce(torch.ones(3))

    errors = memory_ranks.run(2, run, timeout=10.0)
    assert any(isinstance(error, CollectiveMismatchError) for error in errors)


def test_a_message_of_another_shape_is_not_taken(memory_ranks):
    def run(communicator):
        if communicator.index == 0:
            return communicator.send({"x": torch.ones(4)}, 1)
        return communicator.receive({"x": TensorShape(shape=(5,), dtype=torch.float32)}, 0)

    _, error = memory_ranks.run(2, run)
    assert isinstance(error, CollectiveMismatchError)
    assert "rank 0 sent 16 bytes where 20 of 'x' (5,) are due" in str(error)
    assert error.ranks == (0,)


def test_groups_of_other_ranks_in_the_same_file_do_not_meet(memory_ranks, failing):
    topology = Topology(tensor=2, pipeline=2)

    def run(world):
        meeting = Meeting(rank=world.index, rendezvous=memory_ranks.rendezvous, timeout=10.0)
        sums = []
        for axis in (Axis.CONTEXT, Axis.PIPELINE, Axis.TENSOR):
            group = evolve(topology.group_of(axis, world.index), axis=Axis.EXPERT)
            group = evolve(group, index=group.index + 10 * len(sums))
            if len(group.ranks) > 1:
                mine = host_communicator(group, meeting)
                sums.append(float(mine.all_reduce(torch.tensor([10.0**world.index]))))
                mine.close()
        return tuple(sums)

    assert failing(memory_ranks.run(4, run)) == [(101, 11), (1010, 11), (101, 1100), (1010, 1100)]
