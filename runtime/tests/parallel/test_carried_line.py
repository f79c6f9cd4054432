"""The line between stages where the executor carries what they hand on."""

from __future__ import annotations

import pytest
import torch
from attrs import frozen
from hardpoint.config.loading import load_config
from hardpoint.errors import UnsupportedError
from hardpoint.records import WorkerContext
from hardpoint_runtime.device import HostDeviceOps
from hardpoint_runtime.parallel.carried import CarriedLine, NothingHandedOnError
from hardpoint_runtime.parallel.communicator import Meeting, TensorShape
from hardpoint_runtime.parallel.errors import CollectiveMismatchError
from hardpoint_runtime.parallel.groups import Axis, Group
from hardpoint_runtime.parallel.pipeline import StageFailedError, StageLine
from hardpoint_runtime.parallel.seat import take_seat

GROUP = Group(axis=Axis.PIPELINE, index=0, ranks=(0, 1, 2))


class Carrier:
    """Hands on within this process; a step's remains go with the step."""

    def __init__(self):
        self.coming, self.going = [], []

    def begin(self, before):
        self.coming, self.going = [memoryview(each) for each in before], []

    def hand_on(self, data):
        self.going.append(data)

    def handed_on(self):
        return self.coming.pop(0) if self.coming else None


def line(rank, carrier):
    meeting = Meeting(rank=rank, rendezvous="")
    return CarriedLine(GROUP, meeting, carrier, HostDeviceOps())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(3, 4), (2,), (0, 4)])
def test_tensors_arrive_as_they_were_in_order(dtype, shape):
    here, there = Carrier(), Carrier()
    first = torch.arange(24).reshape(4, 6).T[: shape[0], : (*shape, 1)[1]].reshape(shape).to(dtype)
    sent = {"a": first, "b": first + 1}
    line(0, here).send(sent, 1).wait()
    there.begin(here.going)
    due = {name: TensorShape(shape=shape, dtype=dtype) for name in sent}
    found = line(1, there).receive(due, 0)
    assert list(found) == ["a", "b"]
    for name, tensor in sent.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == dtype
    found["a"].add_(1)  # its own memory, not the executor's


def test_nothing_handed_on_and_something_else_are_told_with_the_rank():
    due = {"a": TensorShape(shape=(2,), dtype=torch.float32)}
    carrier = Carrier()
    with pytest.raises(NothingHandedOnError, match="rank 1 handed on no 'a'") as caught:
        line(2, carrier).receive(due, 1)
    assert caught.value.consequence
    carrier.begin([b"12345"])
    with pytest.raises(CollectiveMismatchError, match=r"rank 1 handed on 5 bytes of 'a', not 8"):
        line(2, carrier).receive(due, 1)


@pytest.mark.parametrize(
    "use",
    [
        lambda line, x: line.all_reduce(x),
        lambda line, x: line.all_gather(x, [1, 1, 1]),
        lambda line, x: line.broadcast(x, 0),
        lambda line, x: line.barrier(),
    ],
)
def test_stages_do_nothing_else_together(use):
    with pytest.raises(UnsupportedError, match="its executor carries what stages hand on"):
        use(line(0, Carrier()), torch.zeros(1))


@frozen
class Step:
    step_id: int


class Adding:
    """Each stage adds one; the first begins with the number of the step."""

    def __init__(self, index):
        self.index = index

    def carried_shapes(self, num_tokens):
        return {"x": (num_tokens, 2)}

    def __call__(self, token_ids, positions, step, rows, carried):
        first = torch.full((len(positions), 2), float(100 * step.step_id))
        x = first if carried is None else carried["x"] + 1
        return x if self.index == 2 else {"x": x}


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_a_failure_is_told_to_those_behind_and_ends_with_its_step(failing):
    carriers = [Carrier() for _ in range(3)]
    lines = [line(rank, carrier) for rank, carrier in enumerate(carriers)]
    stages = [StageLine(each, torch.float32, HostDeviceOps()) for each in lines]
    results = {}
    for number in (1, 2, 3):
        positions, before = torch.arange(number + 1), []
        for rank, (carrier, stage) in enumerate(zip(carriers, stages, strict=True)):
            carrier.begin(before)
            try:
                if (failing, 2) == (rank, number):
                    raise ZeroDivisionError("here")
                out = stage.run(Adding(rank), positions, positions, Step(number), None)
                results[rank, number] = None if out is None else out[0, 0].item()
            except (ZeroDivisionError, StageFailedError) as error:
                stage.skip(number, error)
                results[rank, number] = str(error)
            before = carrier.going
    assert [results[2, number] for number in (1, 3)] == [102.0, 302.0]
    if failing is None:
        assert results[2, 2] == 202.0
    else:
        told = f"pipeline stage {failing} (rank {failing}) failed in step 2: "
        assert results[failing + 1, 2] == f"{told}ZeroDivisionError: here"


class NoCollectives(HostDeviceOps):
    """A device on which ranks cannot meet."""

    def make_communicator(self, group, meeting):
        raise AssertionError(f"{group} was joined")


def test_a_worker_whose_executor_carries_joins_no_group_along_the_pipeline():
    config = load_config(
        overrides={"model": "dummy", "pipeline_parallel_size": 2, "platform": "dummy"}, environ={}
    )
    carrier = Carrier()
    context = WorkerContext(
        config=config, rank=1, local_rank=1, world_size=2, rendezvous="file://", stages=carrier
    )
    seat = take_seat(context, NoCollectives(), None)
    assert isinstance(seat.pipeline, CarriedLine)
    assert seat.pipeline.index == 1
