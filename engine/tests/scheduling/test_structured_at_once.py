"""Where several processes plan alike, a request begins with the same step in each, however long its
grammar takes.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

from attrs import evolve
from hardpoint_engine.scheduling.stopping import StopRule
from hardpoint_engine.structured.structured_requests import StructuredRequests


def waiting_request(fakes, scheduler, grammar):
    source = evolve(fakes.make_request("a", range(5), max_tokens=3), grammar=grammar)
    rule = StopRule.of(source.sampling, 5, (), 100)
    return scheduler.roster.add(source, rule, ready=False)


def test_a_grammar_is_waited_for_where_time_may_have_no_part(fakes):
    scheduler = fakes.make_scheduler(num_blocks=9, block_size=4)
    structured = StructuredRequests(scheduler.roster, at_once=True)
    grammar = Future()
    request = waiting_request(fakes, scheduler, grammar)
    added = threading.Event()

    def add():
        structured.add(request)
        added.set()

    thread = threading.Thread(target=add)
    thread.start()
    assert not added.wait(0.05), "it waits"
    grammar.set_result("a grammar")
    assert added.wait(30)
    thread.join()
    structured.settle()
    assert len(structured) == 0
    assert scheduler.schedule().num_tokens == {"a": 5}


def test_else_it_is_not(fakes):
    scheduler = fakes.make_scheduler(num_blocks=9, block_size=4)
    structured = StructuredRequests(scheduler.roster)
    structured.add(waiting_request(fakes, scheduler, Future()))
    structured.settle()
    assert len(structured) == 1
    assert scheduler.schedule() is None
