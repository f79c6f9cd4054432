"""Who of several workers says a line: each line of a log tells it (row Y6)."""

from __future__ import annotations

import logging

import pytest
from hardpoint_engine import LLM

KEYS = {"platform": "dummy", "load_format": "dummy", "executor": "mp"}


def say(worker):
    logging.getLogger("acme").info("loaded\nsecond line of rank %d", worker.rank)
    print("printed")


@pytest.mark.parametrize(
    ("parallel", "titles"),
    [
        ({"tensor_parallel_size": 2}, ["Worker_TP0", "Worker_TP1"]),
        ({"pipeline_parallel_size": 2}, ["Worker_PP0", "Worker_PP1"]),
    ],
)
def test_each_line_of_a_worker_begins_with_its_place(capfd, caplog, parallel, titles):
    caplog.set_level(logging.INFO)  # workers have the level of their driver
    with LLM(**KEYS, **parallel) as llm:
        llm.collective_rpc(say)
    lines = capfd.readouterr().err.splitlines()
    for rank, title in enumerate(titles):
        own = [line.partition(") ")[2] for line in lines if line.startswith(f"({title} pid=")]
        where = own.index("INFO acme: loaded")
        assert own[where : where + 3] == [
            "INFO acme: loaded", f"second line of rank {rank}", "printed",
        ]  # fmt: skip
    assert not [line for line in lines if "acme" in line and not line.startswith("(Worker_")]
