"""The whole table: 5 modes x 4 levels of attention x drafts or not x splittable or not."""

from __future__ import annotations

from itertools import product

import pytest
from hardpoint.errors import ConfigError
from hardpoint_runtime.graphs.modes import GraphMode
from hardpoint_runtime.graphs.resolution import AttentionSupport, Resolved, resolve

N, P, F = GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL
D, FP = GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE
ERROR = None

LEVELS = tuple(AttentionSupport)  # never, single-token decode, uniform batch, always

# asked, drafts, splittable -> what comes of it at each level
TABLE = {
    (N, False, False): (N, N, N, N),
    (N, False, True): (N, N, N, N),
    (N, True, False): (N, N, N, N),
    (N, True, True): (N, N, N, N),
    (P, False, False): (N, N, N, N),
    (P, False, True): (P, P, P, P),
    (P, True, False): (N, N, N, N),
    (P, True, True): (P, P, P, P),
    (F, False, False): (ERROR, D, D, F),
    (F, False, True): (P, FP, FP, F),
    (F, True, False): (ERROR, N, D, F),
    (F, True, True): (P, P, FP, F),
    (D, False, False): (N, D, D, D),
    (D, False, True): (P, D, D, D),
    (D, True, False): (N, N, D, D),
    (D, True, True): (P, P, D, D),
    (FP, False, False): (N, D, D, D),
    (FP, False, True): (P, FP, FP, FP),
    (FP, True, False): (N, N, D, D),
    (FP, True, True): (P, P, FP, FP),
}


def test_the_table_is_whole():
    assert set(TABLE) == set(product(GraphMode, (False, True), (False, True)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("mode", "drafts", "splittable"), TABLE)
def test_resolution(mode, drafts, splittable, level):
    expected = TABLE[mode, drafts, splittable][level]
    query = 4 if drafts else 1
    if expected is ERROR:
        with pytest.raises(ConfigError, match="graph_mode = 'full': attention does not support it"):
            resolve(mode, level, uniform_query=query, splittable=splittable)
        return
    resolved = resolve(mode, level, uniform_query=query, splittable=splittable)
    assert resolved.mode is expected
    assert bool(resolved.reasons) is (expected is not mode)
    assert resolve(expected, level, uniform_query=query, splittable=splittable) == Resolved(
        mode=expected
    )


@pytest.mark.parametrize("part", [F, P])
@pytest.mark.parametrize("mode", [m for m in GraphMode if m is not N])
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_forbidden_is_never_given_and_the_reason_is(mode, level, part):
    forbidden = {part: "the moon is full"}
    if (mode, level, part) == (F, AttentionSupport.NEVER, P):
        with pytest.raises(ConfigError, match="the moon is full"):
            resolve(mode, level, forbidden=forbidden)
        return
    resolved = resolve(mode, level, forbidden=forbidden)
    assert not resolved.mode.contains(part)
    if mode.contains(part):
        assert any("the moon is full" in reason for reason in resolved.reasons)
    assert forbidden == {part: "the moon is full"}  # what was given is as it was


def test_nothing_is_left_where_both_are_forbidden():
    for mode in GraphMode:
        assert resolve(mode, AttentionSupport.ALWAYS, forbidden={F: "a", P: "b"}).mode is N


def test_each_step_down_says_what_and_why():
    resolved = resolve(FP, AttentionSupport.NEVER, splittable=False)
    assert resolved.reasons == (
        "nothing runs in PIECEWISE: the model cannot be split at its attention layers",
        "all batches run in NONE, decode ones not in FULL: attention does not support FULL",
    )
    (first, second) = resolve(F, AttentionSupport.SINGLE_TOKEN_DECODE, uniform_query=3).reasons
    assert first == (
        "mixed batches run in PIECEWISE instead of FULL: attention supports FULL for "
        "SINGLE_TOKEN_DECODE only"
    )
    assert "a decode batch has 3 tokens a request" in second


def test_an_explicit_mode_is_had_or_refused_with_what_can_be_had():
    assert resolve(F, AttentionSupport.ALWAYS).require(F) is F
    with pytest.raises(
        ConfigError, match=r"graph_mode = 'full' cannot be honoured: mixed.*'full_and_piecewise'"
    ):
        resolve(F, AttentionSupport.UNIFORM_BATCH).require(F)


def test_the_least_of_several_attentions_counts():
    levels = [AttentionSupport.ALWAYS, AttentionSupport.NEVER, AttentionSupport.UNIFORM_BATCH]
    assert AttentionSupport.least(levels) is AttentionSupport.NEVER
    assert AttentionSupport.least([]) is AttentionSupport.ALWAYS
