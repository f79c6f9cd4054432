"""What stages hand on, step by step, also where one of them fails."""

from __future__ import annotations

import pytest
import torch
from attrs import frozen
from hardpoint_runtime.device import HostDeviceOps
from hardpoint_runtime.parallel.groups import Axis
from hardpoint_runtime.parallel.pipeline import StageFailedError, StageLine

STAGES = 3
STEPS = range(1, 7)
TOKENS = {step: 2 + step % 2 for step in STEPS}


@frozen
class Step:
    step_id: int


class Adding:
    """Each stage adds one; the first begins with the number of the step."""

    def __init__(self, line):
        self.line = line

    def carried_shapes(self, num_tokens):
        return {"x": (num_tokens, 2)}

    def __call__(self, token_ids, positions, step, rows, carried):
        first = torch.full((len(positions), 2), float(100 * step.step_id))
        x = first if carried is None else carried["x"] + 1
        return x if self.line.index == STAGES - 1 else {"x": x}


def life(line, failing, step_id, before):
    """Run every step on one stage; return what came out, or the error's text."""
    stage, model, results = StageLine(line, torch.float32, HostDeviceOps()), Adding(line), {}
    for step in STEPS:
        fails = (line.index, step) == (failing, step_id)
        positions = torch.arange(TOKENS[step])
        try:
            if fails and before:
                raise ZeroDivisionError("here")
            out = stage.run(model, positions, positions, Step(step), None)
            if fails:
                raise ZeroDivisionError("here")
            results[step] = None if out is None else out[0, 0].item()
        except (ZeroDivisionError, StageFailedError) as error:
            stage.skip(step, error)
            results[step] = str(error)
    stage.settle()
    line.barrier()
    return results


def whole(step):
    return 100.0 * step + STAGES - 1


def test_every_stage_adds_its_part(ranks, failing):
    results = failing(ranks.run(STAGES, lambda line: life(line, -1, 0, True), axis=Axis.PIPELINE))
    assert results[-1] == {step: whole(step) for step in STEPS}


@pytest.mark.parametrize("before", [True, False], ids=["before it runs", "after it has sent"])
@pytest.mark.parametrize("stage", range(STAGES))
def test_a_failure_is_told_to_those_behind_and_ends_with_its_step(ranks, failing, stage, before):
    results = failing(
        ranks.run(STAGES, lambda line: life(line, stage, 3, before), axis=Axis.PIPELINE)
    )
    for rank, mine in enumerate(results):
        for step in STEPS:
            if step != 3 or rank < stage or (rank > stage and not before):
                assert mine[step] == (whole(step) if rank == STAGES - 1 else None)
    assert results[stage][3] == "here"
    if before:
        for behind in range(stage + 1, STAGES):
            assert (
                f"pipeline stage {behind - 1} (rank {behind - 1}) failed in step 3"
                in (results[behind][3])
            )
            assert "ZeroDivisionError: here" in results[behind][3]


def test_a_step_that_a_stage_never_heard_of_is_missed_not_mistaken(ranks, failing):
    """It was lost on the way to one stage only: that stage runs the next as its own."""

    def some(line):
        stage, model, results = StageLine(line, torch.float32, HostDeviceOps()), Adding(line), {}
        for step in STEPS:
            if (line.index, step) == (0, 3):
                continue
            positions = torch.arange(TOKENS[step])
            try:
                out = stage.run(model, positions, positions, Step(step), None)
                results[step] = None if out is None else out[0, 0].item()
            except StageFailedError as error:
                stage.skip(step, error)
                results[step] = str(error)
        stage.settle()
        line.barrier()
        return results

    results = failing(ranks.run(STAGES, some, axis=Axis.PIPELINE))
    assert "sent nothing for step 3, but for step 4" in results[1][3]
    assert "failed in step 3" in results[2][3]
    assert {step: results[2][step] for step in STEPS if step != 3} == {
        step: whole(step) for step in STEPS if step != 3
    }


def test_another_number_of_tokens_is_refused(ranks, failing):
    def unequal(line):
        stage, model = StageLine(line, torch.float32, HostDeviceOps()), Adding(line)
        positions = torch.arange(2 + line.index)
        try:
            stage.run(model, positions, positions, Step(1), None)
        except StageFailedError as error:
            stage.skip(1, error)
            return str(error)
        finally:
            stage.settle()
            line.barrier()

    results = failing(ranks.run(STAGES, unequal, axis=Axis.PIPELINE))
    assert "(rank 0) computed 2 tokens in step 1, not 3" in results[1]
    assert "(rank 1) failed in step 1: StageFailedError" in results[2]
