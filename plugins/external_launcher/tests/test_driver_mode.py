"""With ``driver_only`` rank 0 decides, and the others loop (rows V1 to V9)."""

from __future__ import annotations

import itertools
import json

import pytest

DRIVER = "plugins.external_launcher.driver_only=true"
pytestmark = pytest.mark.slow


def test_the_loop_serves_steps_and_ends_for_everything_else(launch):
    ranks = launch("looping", 3, DRIVER)
    assert ranks.wait() == [0, 0, 0], [ranks.error(rank) for rank in range(3)]
    assert (ranks.out(1), ranks.out(2)) == ("", "")
    told = dict(line.split(" ", 1) for line in ranks.out(0).splitlines())
    assert told["loops"] == "1", "one loop for all steps of two calls"
    assert told["ranks"] == "[0, 1, 2]"
    assert told["after"] == "None"
    assert json.loads(told["same"]) is True
    alone = launch("tokens_of_one", 1)
    assert alone.wait() == [0]
    assert json.loads(told["tokens"]) == json.loads(alone.out(0)), "as of one rank (row V1)"
    assert told["older"] == "8", "eight tokens by the older API's steps"
    spans = json.loads(told["spans"])
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    assert told["parts"] == "[None, 1, 2]"


def test_calls_keep_their_timeout_and_their_errors(launch):
    """Row V9, where the older API drops the timeout."""
    ranks = launch("failing", 2, DRIVER)
    assert ranks.wait() == [0, 0], [ranks.error(rank) for rank in range(2)]
    error, late, tokens, pending = ranks.out(0).splitlines()
    assert error == "1 KeyError 'of this rank'"
    assert late == "late True"
    assert len(json.loads(tokens)) == 3
    assert pending == "1", "the resident loop itself, and nothing else"


def test_what_a_looping_worker_raises_is_the_steps_and_the_loops(launch):
    ranks = launch("loop_fails", 2, DRIVER, 'plugins.dummy.fail_at="step:2@1=raise"')
    assert ranks.wait() == [0, 0], [ranks.error(rank) for rank in range(2)]
    step, loop, after = ranks.out(0).splitlines()
    assert step.startswith("step RemoteError worker rank 1 raised")
    assert loop.startswith("loop RemoteError worker rank 1 raised")
    assert json.loads(after.removeprefix("after ")) == [0, 1]
