"""While a command starts its engine nothing is collected, and what it built is left alone later."""

from __future__ import annotations

import gc
import weakref

import pytest
from hardpoint_engine.cli import generate_command
from hardpoint_engine.cli.late_collection import late_collection


class Cycle:
    """Is not freed by its count of references."""

    def __init__(self):
        self.own = self


@pytest.fixture(autouse=True)
def collector():
    gc.enable()
    gc.unfreeze()
    yield
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_what_is_built_is_not_looked_at_and_the_rest_is():
    with late_collection() as built:
        assert not gc.isenabled()
        first = weakref.ref(Cycle())
        built()
        assert gc.isenabled()
        second = weakref.ref(Cycle())
        gc.collect()
        assert first() is not None
        assert second() is None
    gc.collect()
    assert first() is None


def test_a_start_that_fails_leaves_the_collector_on():
    with pytest.raises(OSError, match="no room"), late_collection():
        raise OSError("no room")


def test_a_collector_that_is_off_or_has_frozen_objects_is_left_alone():
    gc.disable()
    with late_collection() as built:
        built()
        assert not gc.isenabled()
    assert not gc.isenabled()
    gc.enable()
    gc.freeze()
    with late_collection() as built:
        assert gc.isenabled()
        built()
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


def test_generate_starts_its_engine_so(monkeypatch):
    class StartedError(Exception):
        pass

    def start(*args, **kwargs):
        assert not gc.isenabled()
        raise StartedError

    monkeypatch.setattr(generate_command.LLM, "from_config", start)
    with pytest.raises(StartedError):
        generate_command._generate([], None, None, None, None, None, as_json=False)
