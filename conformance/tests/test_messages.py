"""What the kit says of a fault: the rule, what was seen, where it is written, what to do."""

from __future__ import annotations

import pytest
from hardpoint.errors import RemoteError
from hardpoint.worker import Worker
from hardpoint_conformance.contract import ContractError, expect, expect_equal, expect_raises
from hardpoint_conformance.fresh_process import ask, near_misses


def test_a_failure_has_four_parts():
    with pytest.raises(ContractError) as caught:
        expect_equal(1, 2, "one is two", where=Worker.sleep, do="Count again.")
    text = str(caught.value)
    assert "the contract says:  one is two" in text
    assert "seen:               1, not 2" in text
    assert "where it stands:    hardpoint.worker.Worker.sleep: Level 1: keep weights" in text
    assert "what to do:         Count again." in text
    expect(True, "nothing", seen=None, where=Worker, do="nothing")


def test_what_a_worker_raised_counts_as_raised():
    def act():
        raise RemoteError("m", rank=0, type_name="KeyError", remote_traceback="") from KeyError(1)

    assert isinstance(expect_raises(KeyError, act, "raises", where=Worker, do="-"), KeyError)
    with pytest.raises(ContractError, match="it raised KeyError: m"):
        expect_raises(ValueError, act, "raises", where=Worker, do="-")
    with pytest.raises(ContractError, match="it returned None"):
        expect_raises(ValueError, lambda: None, "raises", where=Worker, do="-")


def test_a_method_that_is_misspelt_and_overrides_nothing_is_named():
    class Acme(Worker):
        def slep(self, level): ...

        def wake_up(self, tags): ...

        def wake_ups(self): ...

    assert near_misses(Acme, Worker) == ["Acme.slep (is sleep meant?)"]


def test_a_method_of_a_class_between_is_one_that_can_be_misspelt():
    class Toolkit(Worker):
        def make_device(self): ...

        def make_sampler(self): ...

    class Acme(Toolkit):
        make_devices = ()

        def make_device(self): ...

        def make_smapler(self): ...

        def _make_samplers(self): ...

    assert near_misses(Acme, Worker) == ["Acme.make_smapler (is make_sampler meant?)"]


def test_a_fresh_process_that_fails_says_first_why():
    with pytest.raises(ContractError) as caught:
        ask("resolved_classes", "no-such-platform", {})
    first = str(caught.value).strip().splitlines()[0]
    assert first.startswith("in a fresh process:")
    assert "no-such-platform" in first
