"""An executor's name, its reference, its dotted path and its class are one (case B19, row E1)."""

from __future__ import annotations

import time

import pytest
from hardpoint.errors import CallTimeoutError, ConfigError, EncodingError, RemoteError


def rank_of(worker):
    return worker.rank


def nap(worker):
    time.sleep(0.2)


def test_every_spelling_starts_the_same_thing(spelling, steps):
    group = spelling.ready()
    ranks = list(range(spelling.flavour.world_size))
    assert group.collective_rpc(rank_of) == ranks
    assert [report.rank for report in group.check_health()] == ranks
    output = group.execute_model(steps.new())
    assert output.tokens == ((output.tokens[0][0],),)
    with pytest.raises(RemoteError, match="has no method"):
        group.collective_rpc("absent")
    with pytest.raises(EncodingError):
        group.collective_rpc(rank_of, args=((x for x in ()),))
    with pytest.raises(CallTimeoutError):
        group.collective_rpc(nap, timeout=0)
    assert group.collective_rpc(rank_of, non_block=True).result(60) == ranks


def test_uni_refuses_more_than_one_worker_with_the_way_out(launcher):
    if launcher.flavour.executor != "uni":
        pytest.skip("other executors have more than one worker")
    with pytest.raises(ConfigError, match=r"'dummy' .*needs 2 workers.*'uni' starts one.*'mp'"):
        launcher.loaded(**{"plugins.dummy.num_workers": 2})
