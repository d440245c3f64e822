"""A stop string ends the text, and no part of it is ever shown."""

from __future__ import annotations

import itertools
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.text.stop_strings import StopStrings

few_letters = st.text("ab", max_size=30)
stops_of_few_letters = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def plain_twin(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character over the whole text."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@settings(deadline=None)
@given(few_letters, stops_of_few_letters, st.lists(st.integers(0, 30)))
def test_any_split_equals_looking_at_the_whole(text: str, stops: list[str], cuts: list[int]) -> None:
    watch = StopStrings(stops)
    borders = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    shown = "".join(watch.add(text[start:end]) for start, end in itertools.pairwise(borders))
    if watch.stopped is None:
        shown += watch.finish()
    assert (shown, watch.stopped) == plain_twin(text, stops)


@settings(deadline=None)
@given(few_letters, stops_of_few_letters)
def test_all_that_cannot_begin_a_stop_is_shown_at_once(text: str, stops: list[str]) -> None:
    watch = StopStrings(stops)
    shown = watch.add(text)
    if watch.stopped is None:
        held = [len(text) - i for i in range(len(text)) if any(stop.startswith(text[i:]) for stop in stops)]
        assert len(text) - len(shown) == max(held, default=0)


def test_after_a_stop_nothing_is_shown() -> None:
    watch = StopStrings(["END"])
    assert watch.add("the EN") == "the "
    assert watch.add("D of it") == ""
    assert (watch.stopped, watch.add("more"), watch.finish()) == ("END", "", "")


def test_without_stops_all_text_passes() -> None:
    watch = StopStrings([])
    assert (watch.add("abc"), watch.finish(), watch.stopped) == ("abc", "", None)


def test_the_cost_of_a_character_does_not_grow_with_the_text() -> None:
    def once(num_chars: int) -> float:
        watch = StopStrings(["a" * 255 + "b"] * 16)
        start = time.process_time()
        for _ in range(num_chars):
            watch.add("a")
        return time.process_time() - start

    def seconds(num_chars: int) -> float:
        return min(once(num_chars) for _ in range(3))  # a busy machine takes longer now and then

    # Five times the text costs five times as much; were it quadratic, twenty-five times.
    assert seconds(20_000) < 12 * max(seconds(4_000), 0.01)
