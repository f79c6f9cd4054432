"""Stop strings are found wherever the text is cut, and never shown in part."""

from __future__ import annotations

from hardpoint_engine.text.stop_strings import StopMatch, StopStrings
from hypothesis import given
from hypothesis import strategies as st

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def run(text: str, stops: list[str], cuts: list[int]) -> tuple[str, StopMatch | None]:
    """Feed ``text`` in pieces; return what was shown at most before the end, and the match."""
    matcher, seen, shown = StopStrings(stops), 0, ""
    for cut in [*sorted(cuts), len(text)]:
        match = matcher.find(text[:cut], seen)
        if match is not None:
            return shown, match
        seen = cut
        shown = text[: cut - matcher.held(text[:cut])]
    return shown, None


@given(st.text("abc", max_size=20), STOPS, st.lists(st.integers(0, 20), max_size=6))
def test_the_same_match_however_the_text_is_cut(text, stops, cuts):
    cuts = [min(cut, len(text)) for cut in cuts]
    _, by_character = run(text, stops, list(range(len(text))))
    shown, found = run(text, stops, cuts)
    assert found == by_character
    if found is not None:
        assert text[found.begin : found.end] == found.stop
        assert len(shown) <= found.begin  # nothing of it was shown


@given(st.text("ab", max_size=12), STOPS)
def test_held_is_the_longest_possible_beginning(text, stops):
    matcher = StopStrings(stops)
    beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
    expected = max((len(head) for head in beginnings if text.endswith(head)), default=0)
    assert matcher.held(text) == expected


def test_of_several_the_first_to_end_counts_then_the_longest():
    assert StopStrings(["bcd", "ab"]).find("abcd", 0).stop == "ab"
    assert StopStrings(["c", "abc"]).find("abc", 0).stop == "abc"
