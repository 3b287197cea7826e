"""Stop strings cut at the same place whatever the pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadproof.tokenizer import StopChecker

AB_TEXT = st.text(alphabet="abc", max_size=40)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the stop string that ends first, the longest of those, by trying every place."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            found = max(ending, key=len)
            return (text[:end] if include else text[: end - len(found)]), found
    return text, None


def pieces_of(data: st.DataObject, text: str) -> list[str]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(cuts)]


@given(text=AB_TEXT, stops=STOPS, include=st.booleans(), data=st.data())
def test_any_pieces_give_the_text_of_the_whole(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    checker = StopChecker(stops, include_stop_str_in_output=include)
    shown, fed = "", ""
    expected, found = cut(text, stops, include)
    for piece in pieces_of(data, text):
        shown += checker.push(piece)
        fed += piece
        assert expected.startswith(shown)
        assert checker.stopped == cut(fed, stops, include)[1]
    assert shown + checker.finish() == expected
    assert checker.stopped == found


@given(text=AB_TEXT, stops=STOPS)
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    checker = StopChecker(stops)
    shown = "".join(checker.push(char) for char in text)
    held = checker.finish()
    if checker.stopped is None:
        beginnings = {stop[:size] for stop in stops for size in range(1, len(stop))}
        longest = max((size for size in range(1, len(text) + 1) if text[-size:] in beginnings), default=0)
        assert held == text[len(text) - longest :]
        assert shown + held == text


def test_without_stop_strings_text_passes() -> None:
    checker = StopChecker([])
    assert checker.push("anything") == "anything"
    assert checker.finish() == ""
    assert checker.stopped is None


def test_nothing_follows_a_stop_string() -> None:
    checker = StopChecker(["</s>"])
    assert checker.push("a</") == "a"
    assert checker.push("s>b") == ""
    assert checker.push("more") == ""
    assert checker.finish() == ""
    assert checker.stopped == "</s>"


def test_the_first_complete_stop_string_wins_over_one_that_began_before_it() -> None:
    checker = StopChecker(["abcd", "bc"])
    assert checker.push("xabcd") == "xa"
    assert checker.stopped == "bc"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="not empty"):
        StopChecker(["a", ""])
