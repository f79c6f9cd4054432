"""Errors of workers, and values that cannot cross (row R5, cases B4 and B14, V4)."""

from __future__ import annotations

import threading

import pytest
from hardpoint.errors import (
    CheckpointError,
    EncodingError,
    LifecycleError,
    MemoryBudgetError,
    RemoteError,
    UnsupportedError,
    WorkerDiedError,
)
from hardpoint.messages import GrammarOutput, SchedulerOutput, StepTicket
from hardpoint_dummy.faults import DummyFault


class CustomError(ValueError):
    """With arguments and an attribute of its own."""

    def __init__(self, code, *, detail=""):
        super().__init__(f"code {code}")
        self.code = code
        self.detail = detail


class PicklableError(ValueError):
    def __init__(self, code, detail):
        super().__init__(code, detail)
        self.extra = {"detail": detail}


class HeldError(RuntimeError):
    def __init__(self, lock):
        super().__init__("holds a lock")
        self.lock = lock


def raise_error(worker, what):
    if what == "noted":
        error = PicklableError(7, "x")
        error.add_note("a note of the worker")
        raise error
    if what == "chained":
        try:
            raise KeyError("the root")
        except KeyError as root:
            raise PicklableError(8, "y") from root
    if what == "keyword-only":
        raise CustomError(9, detail="lost")
    if what == "held":
        raise HeldError(threading.Lock())
    if what == "exit":
        raise SystemExit(3)
    if what == "interrupt":
        raise KeyboardInterrupt
    if what == "memory":
        raise MemoryBudgetError("too big")
    raise AssertionError(what)


def caught_from(group, what, **how):
    def call():
        result = group.collective_rpc(raise_error, args=(what,), **how)
        return result.result(60)

    with pytest.raises(RemoteError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("non_block", [False, True])
def test_a_remote_error_has_type_rank_traceback_notes_and_the_original(group, non_block):
    error = caught_from(group, "noted", non_block=non_block)
    assert error.rank in range(group.world_size)
    assert error.type_name.endswith("PicklableError")
    assert "in raise_error" in error.remote_traceback
    assert "a note of the worker" in error.remote_traceback
    original = error.__cause__
    assert type(original) is PicklableError
    assert (original.args, original.extra) == ((7, "x"), {"detail": "x"})
    assert original.__notes__ == ["a note of the worker"]
    assert "a note of the worker" in error.__notes__
    assert any("in raise_error" in note for note in error.__notes__)
    assert "\n" not in str(error)
    assert f"rank {error.rank}" in str(error)


def test_an_exception_that_may_not_travel_still_tells_its_type_and_text(group):
    for what, name, text in (
        ("held", "HeldError", "holds a lock"),
        ("keyword-only", "CustomError", "code 9"),
    ):
        error = caught_from(group, what)
        assert error.type_name.endswith(name)
        assert text in str(error)
        assert "in raise_error" in error.remote_traceback
        assert error.__cause__ is None or type(error.__cause__).__name__ == name


def test_the_exit_code_is_the_originals(group):
    assert caught_from(group, "memory").exit_code == MemoryBudgetError.exit_code
    assert caught_from(group, "noted").exit_code == 1


def test_our_own_errors_travel_whole(group):
    def throw(worker, error):
        raise error

    for error in (
        UnsupportedError("sleep", "platform 'x'", reason="not yet", hint="Wait."),
        CheckpointError("cut short"),
        WorkerDiedError(rank=2, pid=7, exit=-9, last_lines=["gone"]),
        RemoteError("m", rank=1, type_name="E", remote_traceback="t"),
    ):
        with pytest.raises(RemoteError) as caught:
            group.collective_rpc(throw, args=(error,))
        original = caught.value.__cause__
        assert type(original) is type(error)
        assert str(original) == str(error)
        assert vars(original) == vars(error)


# Where a worker may fail.


@pytest.mark.parametrize("point", ["init_device", "load"])
def test_a_failure_of_the_start_is_raised_by_the_start(launcher, world_size, point):
    rank = world_size - 1
    with pytest.raises(RemoteError) as caught:
        launcher.loaded(**{"plugins.dummy.fail_at": f"{point}@{rank}"})
    assert caught.value.rank == rank
    assert caught.value.__cause__.args == (point, 1, rank)


def test_a_failure_of_the_workers_construction_is_raised_as_it_is(launcher):
    with pytest.raises((DummyFault, RemoteError), match="injected fault: build") as caught:
        launcher.loaded(**{"plugins.dummy.fail_at": "build"})
    error = caught.value
    original = error.__cause__ if launcher.flavour.processes else error
    assert type(original) is DummyFault
    assert original.point == "build"


@pytest.mark.parametrize("non_block", [False, True])
def test_a_failing_step_fails_alone_and_is_never_an_output(launcher, steps, non_block):
    group = launcher.ready(**{"plugins.dummy.fail_at": "step:2,sample:1"})

    def run(plan, method=group.execute_model):
        result = method(plan, non_block=non_block)
        return result.result(60) if non_block else result

    first = run(steps.new())
    with pytest.raises(RemoteError) as caught:
        run(steps.next(3, 1))
    assert isinstance(caught.value.__cause__, DummyFault)
    again = run(steps.next(3, 1))
    assert first.tokens[0] != () != again.tokens[0]

    ticket = run(steps.next(4, 2, defer_sampling=True))
    with pytest.raises(RemoteError) as caught:
        run(ticket, group.sample_tokens)
    assert caught.value.__cause__.args[0] == "sample"
    passed = group.collective_rpc("passed_points")
    assert [(each["step"], each["sample"]) for each in passed] == [(4, 1)] * group.world_size


def test_order_of_life_is_kept_and_the_missing_step_named(launcher, steps):
    group = launcher.loaded()
    with pytest.raises(RemoteError, match="call initialize_from_config and compile_or") as caught:
        group.execute_model(steps.empty())
    assert isinstance(caught.value.__cause__, LifecycleError)
    with pytest.raises(RemoteError, match="load_model: was called already"):
        group.collective_rpc("load_model")


def test_a_step_of_another_generation_is_refused(group):
    stale = SchedulerOutput(step_id=1, generation=5)
    with pytest.raises(RemoteError, match="is of generation 5, this worker is of 0"):
        group.collective_rpc("execute_model", args=(stale,))
    assert group.execute_model(stale).generation == 0


def test_sampling_a_step_that_does_not_wait_is_refused(group):
    with pytest.raises(RemoteError, match="step 99 does not wait for sampling"):
        group.sample_tokens(StepTicket(step_id=99), GrammarOutput(req_ids=(), masks=()))


# What cannot cross.


class Holder:
    def __init__(self, held):
        self.plain = 1
        self.held = held


LOCK = threading.Lock()


def test_an_argument_that_cannot_cross_is_named_and_nothing_is_sent(group):
    before = group.collective_rpc("recorded_calls")
    for args, kwargs, path in (
        ((LOCK,), {}, "args[0]"),
        ((1, {"a": [0, LOCK]}), {}, "args[1]['a'][1]"),
        ((Holder((LOCK,)),), {}, "args[0].held[0]"),
        ((), {"key": {"deep": Holder(LOCK)}}, "kwargs['key']['deep'].held"),
        (((x for x in ()),), {}, "args[0]"),
    ):
        with pytest.raises(EncodingError) as caught:
            group.collective_rpc("update_max_model_len", args=args, kwargs=kwargs)
        assert str(caught.value).startswith(f"{path} cannot be sent")
        assert group.collective_rpc("recorded_calls") == before
        assert group.calls.pending == 0


def test_a_callable_that_holds_what_cannot_cross_is_named(group):
    lock = threading.Lock()

    def closure(worker):
        return lock

    with pytest.raises(EncodingError, match=r"^method of .*<closure lock> cannot be sent"):
        group.collective_rpc(closure)


def return_what(worker, what):
    return {"lock": {"inner": [threading.Lock()]}, "generator": (x for x in ())}.get(what, what)


def test_a_result_that_cannot_cross_fails_that_call_alone(group):
    for what, path in (
        ("lock", "result of 'return_what'['inner'][0]"),
        ("generator", "result of 'return_what'"),
    ):
        with pytest.raises(RemoteError) as caught:
            group.collective_rpc(return_what, args=(what,))
        assert isinstance(caught.value.__cause__, EncodingError)
        assert str(caught.value.__cause__).startswith(f"{path} cannot be sent")
        assert set(group.collective_rpc(return_what, args=("fine",))) == {"fine"}


class Unbuildable:
    def __reduce__(self):
        return (_explode, ())


def _explode():
    raise RuntimeError("rebuilt in vain")


def test_an_argument_that_cannot_be_rebuilt_fails_that_call_alone(group):
    with pytest.raises(RemoteError, match="arguments of 'return_what' was sent but cannot") as hit:
        group.collective_rpc(return_what, args=(Unbuildable(),))
    assert isinstance(hit.value.__cause__, EncodingError)
    assert "rebuilt in vain" in str(hit.value)
    assert set(group.collective_rpc(return_what, args=("fine",))) == {"fine"}


def test_a_result_that_cannot_be_rebuilt_fails_that_call_alone(group):
    def make(worker):
        return Unbuildable()

    with pytest.raises(EncodingError, match=r"result of .* was sent but cannot be rebuilt"):
        group.collective_rpc(make)
    assert set(group.collective_rpc(return_what, args=("fine",))) == {"fine"}


def keep_and_change(worker, values):
    values.append(worker.rank)
    return values


def test_a_result_is_a_copy_of_what_the_worker_keeps(group):
    def give(worker):
        if not hasattr(worker, "kept"):
            worker.kept = ["kept"]
        return worker.kept

    for result in group.collective_rpc(give):
        result.append("changed by the driver")
    assert group.collective_rpc(give) == [["kept"]] * group.world_size
