"""Slots of a template are read as a decoder would read them that may write only their labels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dgemma.engine.request import EngineRequest
from dgemma.errors import InputError
from dgemma.tasks.context import Ids
from dgemma.tasks.rounds import drive
from dgemma.tasks.slots import Part, Slot, SlotReadings, read_slots, template_len
from tasks.label_tree import NEWLINE, Lines
from tasks.scripted import BOS, CANVAS, END, Scripted, task_context

PROMPT = (BOS, 700, 701)
# Words of labels, apart from all that stands around slots.
WORDS = (800, 801, 802)
labels_of_a_slot = st.lists(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(tuple), min_size=2, max_size=6, unique=True
).map(tuple)


def read(model: Scripted, parts: list[Part], *, steps: int = 4, draws: int = 1) -> SlotReadings:
    return drive(read_slots(model.task, PROMPT, parts, steps=steps, draws=draws), model)


def lines(*slots: tuple[Ids, ...]) -> list[Part]:
    """Each slot on a line of its own that no other begins like."""
    parts: list[Part] = []
    for number, labels in enumerate(slots):
        parts += [(900 + number, 950), Slot(labels), (NEWLINE,)]
    return parts


def opening(number: int) -> Ids:
    return (900 + number, 950)


# Against brute force

ONE_TOKEN = ((800,), (801,), (802,))
SHARED = ((800, 801), (800, 802), (801, 801))
NESTED = ((800,), (800, 801), (800, 801, 802), (802,))


@settings(max_examples=120)
@given(labels=labels_of_a_slot, seed=st.integers(0, 99))
@example(labels=ONE_TOKEN, seed=1)
@example(labels=SHARED, seed=1)
@example(labels=NESTED, seed=1)
def test_a_slot_is_read_as_by_brute_force(labels: tuple[Ids, ...], seed: int) -> None:
    model = Lines(task_context(), seed=seed)
    (found,) = read(model, lines(labels)).probabilities
    assert found == pytest.approx(model.shares(opening(0), labels, NEWLINE), rel=1e-9)
    assert sum(found) == pytest.approx(1.0, abs=1e-9)


@settings(max_examples=60)
@given(slots=st.lists(labels_of_a_slot, min_size=1, max_size=4), seed=st.integers(0, 99))
@example(slots=[ONE_TOKEN, ONE_TOKEN], seed=1)
@example(slots=[NESTED, SHARED, ONE_TOKEN], seed=1)
def test_slots_are_read_together_as_each_alone(slots: list[tuple[Ids, ...]], seed: int) -> None:
    model = Lines(task_context(canvas_len=32), seed=seed)
    found = read(model, lines(*slots)).probabilities
    assert len(found) == len(slots)
    for number, (labels, shares) in enumerate(zip(slots, found, strict=True)):
        assert shares == pytest.approx(model.shares(opening(number), labels, NEWLINE), rel=1e-9)
        assert sum(shares) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("labels", [ONE_TOKEN, SHARED, NESTED])
def test_a_slot_at_the_end_is_told_by_the_end_of_the_text(labels: tuple[Ids, ...]) -> None:
    model = Lines(task_context())
    (found,) = read(model, [(900, 950), Slot(labels)]).probabilities
    assert found == pytest.approx(model.shares(opening(0), labels, END), rel=1e-9)


def test_a_label_that_goes_on_as_the_template_does_is_refused() -> None:
    labels = ((800,), (800, NEWLINE, 801))
    with pytest.raises(InputError, match="goes on as the template does"):
        read(Lines(task_context()), lines(labels))


class Apart(Scripted):
    """The share of a word is the same wherever it stands."""

    def reads(self, request: EngineRequest, at: int) -> Mapping[int, float]:
        assert request.pinned is not None
        return {word: 1.0 + word % 7 for word in request.pinned.among.get(at, (NEWLINE,))}


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (((800,), (801,)), ((800,), (801,), (802,))),
        (((800, 801), (802,)), ((801, 800), (801, 802))),
        (((800, 801), (800, 802)), ((801, 800), (801, 802), (803, 800))),
    ],
)
def test_slots_may_stand_side_by_side(left: tuple[Ids, ...], right: tuple[Ids, ...]) -> None:
    model = Apart(task_context())
    found = read(model, [(900,), Slot(left), Slot(right), (NEWLINE,)]).probabilities

    def share(labels: tuple[Ids, ...], label: Ids) -> float:
        product = 1.0
        for at, word in enumerate(label):
            words = {one[at] for one in labels if one[:at] == label[:at]}
            product *= (1.0 + word % 7) / sum(1.0 + other % 7 for other in words)
        return product

    assert found[0] == pytest.approx([share(left, label) for label in left], rel=1e-9)
    assert found[1] == pytest.approx([share(right, label) for label in right], rel=1e-9)


def test_side_by_side_a_label_that_begins_another_is_refused() -> None:
    left = Slot(((801, 800), (800,), (802,), (800, 802)))
    with pytest.raises(
        InputError, match="side by side, and one label begins with another: where would it end"
    ):
        read(Apart(task_context()), [left, Slot(ONE_TOKEN)])
    # The last of them has a text after it that tells.
    assert read(Apart(task_context()), [Slot(ONE_TOKEN), left, (NEWLINE,)]).probabilities


@settings(max_examples=40)
@given(slots=st.lists(labels_of_a_slot, min_size=1, max_size=2), seed=st.integers(0, 99), data=st.data())
def test_the_order_of_labels_changes_no_request_and_no_bit(
    slots: list[tuple[Ids, ...]], seed: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(slots[0]))))
    one, other = (Lines(task_context(), seed=seed) for _ in range(2))
    first, *rest = read(one, lines(*slots)).probabilities
    again, *others = read(other, lines(tuple(slots[0][at] for at in order), *slots[1:])).probabilities
    assert again == tuple(first[at] for at in order)
    assert others == rest
    assert one.rounds == other.rounds


def test_the_order_of_labels_does_not_choose_what_other_slots_are_shown() -> None:
    """Where a slot is still open while another is read, one of its labels stands for all that begin alike."""
    four = ((800, 801), (800, 802), (801, 801), (801, 802))
    slots = four, four
    one, other = Lines(task_context()), Lines(task_context())
    read(one, lines(*slots))
    read(other, lines(slots[0][::-1], slots[1][::-1]))
    assert one.rounds == other.rounds


def test_no_order_of_three_labels_changes_a_bit() -> None:
    found = {
        frozenset(zip(labels, read(Lines(task_context()), lines(labels)).probabilities[0], strict=True))
        for labels in permutations(((800, 801), (800, 802), (801,)))
    }
    assert len(found) == 1


class Moody(Lines):
    """Another opinion under every seed."""

    def reads(self, request: EngineRequest, at: int) -> Mapping[int, float]:
        self.seed = request.seed
        found = super().reads(request, at)
        total = sum(found.values())
        return {word: share / total for word, share in found.items()}


def test_opinions_of_several_canvases_are_averaged_at_each_parting() -> None:
    labels = ((800, 801), (800, 802), (801,))
    model = Moody(task_context(seed=40))
    (found,) = read(model, lines(labels), draws=3).probabilities

    def mean(line: Ids, word: int, words: Ids) -> float:
        shares = []
        for seed in (40, 41, 42):
            model.seed = seed
            shares.append(model.weight(line, word) / sum(model.weight(line, other) for other in words))
        return sum(shares) / 3

    first, second = mean(opening(0), 800, (800, 801)), mean((*opening(0), 800), 801, (801, 802))
    assert found == pytest.approx((first * second, first * (1 - second), 1 - first), rel=1e-9)
    assert [[one.seed for one in asked] for asked in model.rounds] == [[40, 41, 42]] * 2


def test_opinions_of_several_branches_are_not_mixed_up() -> None:
    labels = ((800, 801), (800, 802), (801, 801), (801, 802))
    alone = read(Moody(task_context(seed=40)), lines(labels)).probabilities
    model = Moody(task_context(seed=40))
    assert read(model, lines(labels), draws=2).probabilities != alone
    assert len(model.rounds[1]) == 4
    model = Lines(task_context())
    (found,) = read(model, lines(labels), draws=2).probabilities
    assert found == pytest.approx(model.shares(opening(0), labels, NEWLINE), rel=1e-9)


# What is on the canvases


def test_labels_of_one_token_take_one_canvas_for_all_slots() -> None:
    model = Lines(task_context())
    found = read(model, lines(ONE_TOKEN, ONE_TOKEN[:2]), steps=5)
    ((request,),) = model.rounds
    assert found.answers
    assert found.forwards == 3
    assert request.prompt == PROMPT
    assert request.params.max_denoising_steps == 5
    assert request.params.temperature == 0.0
    assert request.params.max_tokens == CANVAS
    assert request.pinned is not None
    assert request.pinned.among == {2: (800, 801, 802), 6: (800, 801)}
    assert request.pinned.watch == request.pinned.among
    assert [request.pinned.fixed.get(at) for at in range(CANVAS)] == [
        900, 950, None, NEWLINE, 901, 950, None, NEWLINE, *[END] * 8
    ]  # fmt: skip


def test_where_labels_part_again_each_branch_has_a_canvas_and_other_slots_show_their_best() -> None:
    class Prefers(Lines):
        """801 to 800 and 802, in the ratio 2 to 1."""

        def weight(self, line: Ids, word: int) -> float:
            return 2.0 if word == 801 else 1.0

    model = Prefers(task_context())
    slots = ((801, 800), (801, 801), (800, 802), (800, 800)), ((800,), (801,))
    found = read(model, lines(*slots))
    assert found.probabilities[0] == pytest.approx([2 / 9, 4 / 9, 1 / 6, 1 / 6])
    first, second = model.rounds
    assert len(first) == 1
    assert len(second) == 2
    assert found.forwards == 9
    shown = [
        [one.pinned.fixed.get(at) for at in range(9)] for one in second if one.pinned and not one.pinned.begin
    ]
    # The other slot's likeliest label stands in it.
    assert sorted(shown, key=lambda row: row[2] or 0) == [
        [900, 950, 800, None, NEWLINE, 901, 950, 801, NEWLINE],
        [900, 950, 801, None, NEWLINE, 901, 950, 801, NEWLINE],
    ]
    assert [one.pinned.among for one in second if one.pinned] == [{3: (800, 802)}, {3: (800, 801)}]


def test_a_branch_that_hardly_anybody_takes_is_not_followed() -> None:
    class Sure(Lines):
        def weight(self, line: Ids, word: int) -> float:
            return 1e-8 if word == 800 and len(line) == 2 else 1.0

    model = Sure(task_context())
    (found,) = read(model, lines(((800, 801), (800, 802), (801,), (802, 800), (802, 801)))).probabilities
    assert sum(found) == pytest.approx(1.0, abs=1e-9)
    assert found[0] == found[1] == pytest.approx(0.25e-8, rel=1e-6), "its labels share what it has"
    assert len(model.rounds[1]) == 1, "only the likely branch is read"


def test_a_template_without_slots_asks_nothing() -> None:
    model = Lines(task_context())
    found = read(model, [(900, 901)])
    assert (found.probabilities, found.answers, model.rounds) == ((), (), [])


# What is refused


def with_length(length: int) -> list[Part]:
    return [(900,) * (length - 3), Slot(((800,), (801, 802))), (NEWLINE,)]


def test_a_template_as_long_as_a_canvas_is_read_and_a_longer_one_refused() -> None:
    assert template_len(with_length(CANVAS)) == CANVAS
    (found,) = read(Apart(task_context()), with_length(CANVAS)).probabilities
    assert sum(found) == pytest.approx(1.0)
    with pytest.raises(InputError, match=r"up to 17 tokens; a canvas has 16\. Shorten it"):
        read(Apart(task_context()), with_length(CANVAS + 1))


def test_a_slot_that_ends_a_full_canvas_is_read() -> None:
    parts: list[Part] = [(900,) * 14, Slot(((800,), (800, 801)))]
    (found,) = read(Apart(task_context()), parts).probabilities
    end, more = 1.0 + END % 7, 1.0 + 801 % 7
    assert found == pytest.approx((end / (end + more), more / (end + more)))


@pytest.mark.parametrize("labels", [(), ((800,),), ((800,), (800,)), ((800,), ())], ids=repr)
def test_a_slot_without_a_choice_is_refused(labels: tuple[Ids, ...]) -> None:
    with pytest.raises(InputError, match="two labels or more, each of a token or more, no two of them alike"):
        Slot(labels)


def test_readings_of_a_sure_model_stay_numbers() -> None:
    """Shares so small that their products vanish still sum to 1."""

    class Certain(Lines):
        def weight(self, line: Ids, word: int) -> float:
            return 1.0 if word == 801 else 1e-300

    (found,) = read(Certain(task_context()), lines(NESTED)).probabilities
    assert sum(found) == pytest.approx(1.0, abs=1e-9)
    assert all(math.isfinite(share) for share in found)


def test_with_canvas_len_auto_a_canvas_holds_the_template_and_its_end() -> None:
    parts = lines(ONE_TOKEN, NESTED)
    whole = Lines(task_context(), seed=3)
    task = whole.task
    short = Lines(replace(task, params=replace(task.params, canvas_len="auto")), seed=3)
    found = read(short, parts)
    assert found.probabilities == read(whole, parts).probabilities
    longest = template_len(parts) + 1
    for request in short.written:
        assert request.params.canvas_len == request.params.max_tokens
        assert longest <= int(request.params.canvas_len or 0) < longest + 8
    assert {request.params.max_tokens for request in whole.written} == {CANVAS}
