"""How outputs are compared: as far as they are decided, and within the tolerance."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hardpoint_conformance import ModelRunnerSuite, Oracle, Probe
from hardpoint_conformance.contract import ContractError
from hardpoint_conformance.dummy_probe import DummyProbe
from hardpoint_conformance.generation import Bench
from hardpoint_conformance.oracle_choice import tolerance_for
from hardpoint_conformance.steps import GREEDY, Request

TOLERANCE = 0.1


class Table(Oracle):
    """Logits as they are written."""

    name = "a table"

    def __init__(self, *rows):
        self.rows = np.array(rows, dtype=float)

    def logits(self, tokens):
        return self.rows[: len(tokens)]


def bench(*rows):
    made = object.__new__(Bench)
    made.tolerance, made.oracle = TOLERANCE, Table(*rows)
    made.description = SimpleNamespace(eos_token_ids=())
    return made


def answered(*output):
    return Request("r", (0,), GREEDY, [0, *output])


CLEAR, CLOSE, JUST_CLEAR = (5, 0, 0), (1, 1 - 1.9 * TOLERANCE, 0), (1, 1 - 2.1 * TOLERANCE, 0)


def test_greedy_ids_are_compared_up_to_the_first_that_is_not_decided():
    """After it two right answers may go their own ways."""
    assert bench(CLEAR, CLEAR, CLEAR, CLEAR).check_greedy(answered(0, 0, 0)) == 3
    assert bench(CLEAR, CLOSE, CLEAR, CLEAR).check_greedy(answered(0, 1, 2)) == 1
    assert bench(CLOSE, CLEAR).check_greedy(answered(2)) == 0


@pytest.mark.parametrize(
    ("rows", "output", "place"),
    [
        ((CLEAR, CLEAR), (1,), 0),
        ((CLEAR, CLEAR, CLEAR, CLEAR), (0, 0, 1), 2),
        ((JUST_CLEAR, CLEAR), (1,), 0),
    ],
)
def test_a_greedy_id_that_is_decided_and_another_is_told(rows, output, place):
    with pytest.raises(ContractError, match=rf"token {place} after .* is 1; a table has 0"):
        bench(*rows).check_greedy(answered(*output))


WANTED = np.log([[0.5, 0.4, 0.1], [0.2, 0.2, 0.6]])


@pytest.mark.parametrize(
    ("factor", "good"), [(1 + 0.9 * TOLERANCE, True), (1 + 1.1 * TOLERANCE, False)]
)
def test_scores_are_compared_within_the_tolerance(factor, good):
    seen = WANTED.copy()
    seen[1, 2] += np.log(factor)
    if good:
        bench().check_close(seen, WANTED, "scores")
    else:
        with pytest.raises(ContractError, match="scores: row 1, token 2"):
            bench().check_close(seen, WANTED, "scores")


def test_scores_that_are_missing_are_told():
    with pytest.raises(ContractError, match="1 rows for 2 tokens"):
        bench().check_close(WANTED[:1], WANTED, "scores")
    holed = WANTED.copy()
    holed[0, 0] = np.nan
    with pytest.raises(ContractError, match="log-probabilities are those of"):
        bench().check_close(holed, WANTED, "scores")


def test_a_tolerance_is_the_probes_own_or_that_of_the_type():
    class Strict(Probe):
        logit_tolerance = 1e-5

    assert tolerance_for(Probe(), "float32") < tolerance_for(Probe(), "bfloat16")
    assert tolerance_for(Strict(), "bfloat16") == 1e-5


class Blind(DummyProbe):
    """Lets everything pass."""

    logit_tolerance = 1e3


def test_a_tolerance_under_which_nothing_is_compared_is_told():
    suite = ModelRunnerSuite.of("dummy", probe=Blind)
    try:
        with pytest.raises(ContractError, match="only 0 of 40 tokens could be compared"):
            suite().test_greedy_ids_are_the_oracles()
    finally:
        suite.subject.remove()
