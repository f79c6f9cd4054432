"""Stop strings are found wherever the text is cut, and never shown in part."""

from __future__ import annotations

import pytest
from hardpoint.sampling_params import SamplingParams
from hardpoint_engine.completion import Completion
from hardpoint_engine.request import EngineOutput
from hardpoint_engine.text.stop_strings import StopMatch, StopStrings
from hardpoint_engine.text.tokenizer_bytes import ByteTokenizer
from hypothesis import given
from hypothesis import strategies as st

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def run(text: str, stops: list[str], cuts: list[int]) -> tuple[str, StopMatch | None]:
    """Feed ``text`` in pieces; return what was shown at most before the end, and the match."""
    matcher, seen, shown = StopStrings(stops), 0, ""
    for cut in [*sorted(cuts), len(text)]:
        match = matcher.add(text[seen:cut])
        if match is not None:
            return shown, match
        seen = cut
        shown = text[: cut - matcher.held]
    return shown, None


def matches(text: str, stops: list[str], after: int) -> list[StopMatch]:
    """Return all that end beyond ``after``, the first to end and of these the longest first."""
    found = [
        StopMatch(stop, begin, begin + len(stop))
        for stop in stops
        for begin in range(len(text))
        if text.startswith(stop, begin) and begin + len(stop) > after
    ]
    return sorted(found, key=lambda match: (match.end, match.begin))


@given(st.text("abc", max_size=20), STOPS, st.lists(st.integers(0, 20), max_size=6))
def test_the_same_match_however_the_text_is_cut(text, stops, cuts):
    cuts = [min(cut, len(text)) for cut in cuts]
    _, by_character = run(text, stops, list(range(len(text))))
    shown, found = run(text, stops, cuts)
    assert found == by_character == next(iter(matches(text, stops, 0)), None)
    if found is not None:
        assert text[found.begin : found.end] == found.stop
        assert len(shown) <= found.begin  # nothing of it was shown


@given(st.text("ab", max_size=12), st.text("ab", max_size=12), STOPS)
def test_one_that_did_not_count_changes_nothing_for_those_after_it(before, piece, stops):
    """As below ``min_tokens``. What ends later may have begun before."""
    matcher = StopStrings(stops)
    for character in before:
        matcher.add(character)
    expected = matches(before + piece, stops, len(before))
    assert matcher.add(piece) == next(iter(expected), None)


@given(st.text("ab", max_size=12), STOPS)
def test_held_is_the_longest_possible_beginning(text, stops):
    matcher = StopStrings(stops)
    matcher.add(text)
    beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
    expected = max((len(head) for head in beginnings if text.endswith(head)), default=0)
    assert matcher.held == expected


def test_of_several_the_first_to_end_counts_then_the_longest():
    assert StopStrings(["bcd", "ab"]).add("abcd").stop == "ab"
    assert StopStrings(["c", "abc"]).add("abc").stop == "abc"


@pytest.fixture
def lines(lines_run):
    """Count the lines of our own code that an answer of ``text`` runs, a character a token."""

    def of(stops: list[str], text: str) -> int:
        answer = Completion(0, SamplingParams(stop=stops, max_tokens=len(text)), ByteTokenizer())

        def work():
            for token in text.encode():
                answer.add(EngineOutput(req_id="r", new_tokens=(token,)))

        count = lines_run(work, within="text/stop_strings")
        assert answer.snapshot().finish_reason is None
        return count

    return of


@pytest.mark.parametrize(
    ("stop", "text"),
    [("xaaa" * 1024, "a"), ("a" * 2000 + "b", "a"), (("a" * 30 + "b") * 100, "a" * 29 + "c")],
)
def test_a_token_costs_the_same_however_long_text_and_stops_are(lines, stop, text):
    def of(length):
        return lines([stop], (text * length)[:length])

    short, long = of(200), of(1600)
    assert long <= 8 * short * 1.05
    assert long <= 30 * 1600
