"""Histograms and request times."""

from __future__ import annotations

from hardpoint_engine.metrics import EngineMetrics, Histogram
from hardpoint_engine.request import RequestMetrics


def test_a_histogram_counts_at_most_each_bound():
    histogram = Histogram((1, 10))
    assert histogram.mean is None
    for value in (0.5, 1, 1.5, 10, 11, None):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.count == 5
    assert histogram.mean == 24 / 5
    assert histogram.as_dict() == {"bounds": [1, 10], "counts": [2, 2, 1], "total": 24}


def request(**changes):
    values = {
        "arrival": 1.0, "first_scheduled": 1.5, "first_token": 2.0, "finished": 5.0,
        "num_prompt_tokens": 3, "num_generation_tokens": 4, "num_cached_tokens": 0,
        "num_preemptions": 0,
    }  # fmt: skip
    return RequestMetrics(**(values | changes))


def test_times_of_a_request():
    whole = request()
    assert (whole.queue_time, whole.time_to_first_token) == (0.5, 1.0)
    assert (whole.time_per_output_token, whole.e2e_latency) == (1.0, 4.0)
    never_ran = request(first_scheduled=None, first_token=None, num_generation_tokens=0)
    assert never_ran.queue_time is None
    assert never_ran.time_to_first_token is None
    assert never_ran.time_per_output_token is None
    assert request(num_generation_tokens=1).time_per_output_token is None


def test_two_engines_count_apart():
    first, second = EngineMetrics(), EngineMetrics()
    first.finished["stop"] = 1
    first.step_seconds.observe(1)
    assert second.finished == {}
    assert second.step_seconds.count == 0
    assert second.cache_hit_rate is None
