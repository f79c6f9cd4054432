"""The truth table of every helper of GraphMode."""

from __future__ import annotations

import pytest
from hardpoint.config.keys import BY_PATH
from hardpoint.errors import ConfigError
from hardpoint_runtime.graphs.modes import GraphMode

NONE, PIECEWISE, FULL = GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL
DECODE_ONLY, BOTH = GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE

TABLE = [
    # mode, decode, mixed, single, separate decode, needs splitting
    (NONE, NONE, NONE, True, False, False),
    (PIECEWISE, PIECEWISE, PIECEWISE, True, False, True),
    (FULL, FULL, FULL, True, False, False),
    (DECODE_ONLY, FULL, NONE, False, True, False),
    (BOTH, FULL, PIECEWISE, False, True, True),
]


def test_the_table_has_every_mode():
    assert [row[0] for row in TABLE] == list(GraphMode)


@pytest.mark.parametrize(("mode", "decode", "mixed", "single", "separate", "splitting"), TABLE)
def test_helpers(mode, decode, mixed, single, separate, splitting):
    assert mode.decode is decode
    assert mode.mixed is mixed
    assert mode.is_single is single
    assert mode.separate_decode is separate
    assert mode.needs_splitting is splitting
    assert mode.parts == {decode, mixed} - {NONE}
    assert {part for part in (NONE, PIECEWISE, FULL) if mode.contains(part)} == mode.parts | {NONE}
    assert GraphMode.pair(decode, mixed) is mode


def test_what_is_no_pair_of_a_mode_is_refused():
    with pytest.raises(ValueError, match="decode in PIECEWISE and the rest in FULL"):
        GraphMode.pair(PIECEWISE, FULL)


@pytest.mark.parametrize("mode", GraphMode)
def test_the_configuration_names_every_mode(mode):
    assert GraphMode.named(mode.value) is mode
    assert GraphMode.named(mode.value.upper()) is mode
    assert set(BY_PATH["graph_mode"].choices) == {each.value for each in GraphMode}


def test_an_unknown_name_lists_the_modes():
    with pytest.raises(ConfigError, match=r"graph_mode = 'half'.*full_and_piecewise"):
        GraphMode.named("half")
