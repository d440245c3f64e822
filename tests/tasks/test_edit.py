"""An edit changes what the model likes better otherwise; everything else keeps its every byte."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.engine.request import EngineRequest
from dgemma.errors import InputError
from dgemma.params import GenerationParams
from dgemma.tasks.context import Ids, TaskContext
from dgemma.tasks.edit import Edited, EditOptions, edit
from dgemma.tasks.rounds import drive
from tasks.scripted import (
    BOS,
    CANVAS,
    END,
    TEMPLATE,
    TOKENIZER,
    Scripted,
    encode,
    gap_of,
    plain_words,
    task_context,
)

TEXT = "The number of bytes in the file."
LIKED, DISLIKED = -0.1, -20.0  # nats


class Taste(Scripted):
    """Likes the words it knows, except those it dislikes, and offers others where there is a gap."""

    def __init__(self, task: TaskContext, *, dislikes: str = "", offers: str = "", knows: str = "") -> None:
        super().__init__(task)
        self.offers = encode(offers)
        self.liked = {*encode(TEXT), *encode(knows), *self.offers} - {*encode(dislikes)}

    def reads(self, request: EngineRequest, at: int) -> Mapping[int, float]:
        begin = request.pinned.begin if request.pinned else {}
        word, other = plain_words()[0], plain_words()[1]
        if at in begin:
            share = 0.9 if begin[at] in self.liked else 1e-6
            return {begin[at]: share, other: 1 - share}
        if self.offers:
            word = self.offers[min(at, len(self.offers) - 1)]
        return {word: 0.9, other: 0.1}

    def likes(self, before: Ids, token: int) -> float:
        return LIKED if token in self.liked else DISLIKED


def run(
    model: Taste, text: str, instruction: str = "", *, before: str = "", after: str = "", **options: Any
) -> Edited:
    work = edit(model.task, text, instruction, EditOptions(**options), before=before, after=after)
    return drive(work, model)


def looks(model: Scripted) -> list[EngineRequest]:
    return [one for one in model.written if one.pinned and one.pinned.begin]


def gaps(model: Scripted) -> list[EngineRequest]:
    return [one for one in model.written if not (one.pinned and one.pinned.begin)]


# What changes


def test_exactly_the_word_that_is_disliked_changes() -> None:
    model = Taste(task_context(), dislikes=" bytes", offers=" lines")
    found = run(model, TEXT, closeness=1.0)
    assert found.text == "The number of lines in the file."
    (change,) = found.changes
    assert (change.start, change.stop, change.old, change.new) == (13, 19, " bytes", " lines")
    assert change.gain == pytest.approx(LIKED - DISLIKED - 3.0), "three letters differ"
    assert found.num_windows == 1


def test_changes_are_told_by_their_place_in_the_old_text() -> None:
    text = "bytes of bytes, and a naïvely put bytes"
    model = Taste(task_context(canvas_len=32), dislikes=" bytes", offers=" a", knows=text)
    found = run(model, text, closeness=0.0)
    assert found.text == "bytes of a, and a naïvely put a"
    assert [change.start for change in found.changes] == sorted(change.start for change in found.changes)
    assert all(text[one.start : one.stop] == one.old for one in found.changes)
    assert len(found.changes) == found.num_windows == 2


def test_a_text_that_is_liked_stays_byte_for_byte_and_is_only_looked_at() -> None:
    for text in (TEXT, "x", " ", "\r\n\tif x:\n", "naïve café 😀", "a" * 40):
        model = Taste(task_context(), offers=" lines", knows=text)
        found = run(model, text)
        assert (found.text, found.changes, found.num_windows) == (text, (), 0)
        assert len(model.rounds) == 1
        assert len(looks(model)) == len(model.written) == len(model.scored)


def test_a_word_that_is_disliked_stays_where_nothing_better_is_known() -> None:
    model = Taste(task_context(), dislikes=" bytes lines", offers=" lines")
    found = run(model, TEXT, closeness=0.0)
    assert (found.text, found.changes, found.num_windows) == (TEXT, (), 1)


def test_a_slip_is_mended_though_the_canvas_offers_nothing() -> None:
    """Words one slip away are tried by themselves."""
    slip = "The functoin returns."
    model = Taste(task_context(), dislikes="oin", offers="oin", knows=slip + " function")
    assert encode("oin")[0] in encode(slip)
    found = run(model, slip)
    assert found.text == "The function returns."
    assert [(one.old, one.new) for one in found.changes] == [(" functoin", " function")]


def test_without_spellings_only_what_the_canvas_offers_is_tried() -> None:
    slip = "The functoin returns."
    model = Taste(task_context(), dislikes="oin", offers="oin", knows=slip + " function")
    found = run(model, slip, spellings=False)
    assert (found.text, found.num_windows) == (slip, 1)


def test_a_word_of_many_tokens_may_become_one() -> None:
    slip = "The functoin returns."
    model = Taste(task_context(), dislikes="oin", offers=" method", knows=slip)
    assert run(model, slip, closeness=0.0).text == "The method returns."


def test_under_an_instruction_a_word_may_become_longer() -> None:
    class Longer(Taste):
        """Has an offer for gaps of two tokens only."""

        def reads(self, request: EngineRequest, at: int) -> Mapping[int, float]:
            found = super().reads(request, at)
            is_gap = not (request.pinned and request.pinned.begin)
            return {plain_words()[1]: 1.0} if is_gap and gap_of(request) != 2 else found

    for instruction, text in (("", TEXT), ("Say more.", "The number of text lines in the file.")):
        model = Longer(task_context(template=TEMPLATE), dislikes=" bytes", offers=" text lines")
        assert run(model, TEXT, instruction, closeness=1.0).text == text


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"closeness": 5.2, "gain": 4.0}, True),  # 19.9 - 3 * 5.2 = 4.3
        ({"closeness": 5.4, "gain": 4.0}, False),  # 3.7
        ({"closeness": 5.4, "gain": 3.6}, True),
        ({"closeness": 0.0, "gain": 19.8}, True),
        ({"closeness": 0.0, "gain": 20.0}, False),
        ({"closeness": 6.6, "gain": 0.0}, True),  # 0.1
        ({"closeness": 6.7, "gain": 0.0}, False),  # -0.2
    ],
)
def test_a_change_must_gain_more_than_its_letters_cost(options: dict[str, float], changes: bool) -> None:
    found = run(Taste(task_context(), dislikes=" bytes", offers=" lines"), TEXT, **options)
    assert bool(found.changes) == changes


@pytest.mark.parametrize(("suspicion", "num_windows"), [(0.0, 7), (33.0, 1), (34.5, 0)])
def test_only_words_that_both_passes_together_dislike_enough_are_looked_at(
    suspicion: float, num_windows: int
) -> None:
    """One door gives 13.8 nats and the other 20; what ends the sentence is no word."""
    model = Taste(task_context(), dislikes=" bytes", offers=" lines")
    assert run(model, TEXT, suspicion=suspicion, windows=64).num_windows == num_windows


def test_an_instruction_lets_words_be_replaced_and_none_only_mends_slips() -> None:
    for instruction, text in (("Say lines.", "The number of lines in the file."), ("", TEXT), ("  ", TEXT)):
        model = Taste(task_context(template=TEMPLATE), dislikes=" bytes", offers=" lines")
        assert run(model, TEXT, instruction).text == text


@pytest.mark.parametrize("windows", [1, 2, 3])
def test_no_more_windows_are_tried_than_requested(windows: int) -> None:
    model = Taste(task_context(), dislikes=" bytes file number", offers=" lines")
    found = run(model, TEXT, windows=windows, closeness=0.0)
    assert found.num_windows == len(found.changes) == windows


def test_what_is_told_of_an_edit_is_what_it_took() -> None:
    model = Taste(task_context(seed=5), dislikes=" bytes", offers=" lines")
    found = run(model, TEXT)
    assert found.forwards == len(model.written), "each canvas takes one step"
    assert {one.params.max_denoising_steps for one in model.written} == {1}
    assert found.prompt_tokens == 1 + len(encode(TEXT))
    assert found.seed == 5
    assert {one.seed for one in model.written} == {5}


# What is shown


@pytest.mark.parametrize("instruction", ["", "Mend the slips."])
def test_texts_around_it_are_shown_and_stay(instruction: str) -> None:
    before, after = "We count bytes. ", " The bytes are counted."
    model = Taste(
        task_context(canvas_len=32, template=TEMPLATE),
        dislikes=" bytes",
        offers=" lines",
        knows=before + after,
    )
    found = run(model, TEXT, instruction, before=before, after=after, closeness=1.0)
    assert found.text == "The number of lines in the file."
    assert found.num_windows == 1, "only the text itself is looked at"
    lead = (BOS,)
    if instruction:
        asked = f"{instruction}\n\n{before}{TEXT}{after}"
        lead = tuple(TEMPLATE.render([{"role": "user", "content": asked}]))
    (look,) = looks(model)
    text, follows = encode(TEXT), encode(after)
    assert look.prompt == (*lead, *encode(before))
    assert look.pinned is not None
    assert look.pinned.begin == dict(enumerate(text))
    assert look.pinned.watch == {at: (token,) for at, token in enumerate(text)}
    assert [look.pinned.fixed[at] for at in range(len(text), 32)] == [
        *follows,
        *[END] * (32 - len(text) - len(follows)),
    ]
    assert min(look.pinned.fixed) == len(text)
    (score,) = [one for one in model.rounds[0] if one.score_from]
    assert score.prompt == (*look.prompt, *text)
    assert score.score_from == len(look.prompt)


@pytest.mark.parametrize(
    ("slip", "instruction", "lengths"),
    [
        ("The bytes", "", [1]),
        ("The bytes", "Mend it.", [1, 2]),
        ("The functoin", "", [1, 4]),
        ("The functoin", "Mend it.", [3, 4, 5]),
    ],
)
def test_a_window_is_tried_at_lengths_near_its_own(slip: str, instruction: str, lengths: list[int]) -> None:
    """Without an instruction only slips are mended, which break a word that was one token."""
    model = Taste(task_context(template=TEMPLATE), dislikes=slip, knows="The")
    model.liked |= {*encode("The")}
    run(model, slip, instruction)
    assert [gap_of(one) for one in gaps(model)] == lengths


def test_a_window_is_a_gap_in_the_text_as_it_stands() -> None:
    after = " It is large."
    model = Taste(task_context(), dislikes=" bytes", offers=" lines", knows=after)
    run(model, TEXT, after=after)
    at = encode(TEXT).index(encode(" bytes")[0])
    follows = (*encode(TEXT)[at + 1 :], *encode(after))
    assert len(gaps(model)) == 1
    for request in gaps(model):
        assert request.prompt == (BOS, *encode(TEXT)[:at])
        assert request.pinned is not None
        gap = gap_of(request)
        row = (*follows, *[END] * CANVAS)[: CANVAS - gap]
        assert request.pinned.fixed == dict(enumerate(row, start=gap))
        assert request.logit_bias, "no control may be written"
    # The old text and each new one are scored with the same tokens after them.
    old, *new = model.rounds[-1]
    assert old.prompt == (BOS, *encode(TEXT)[: at + 1], *follows[:12])
    assert len(new) > 1
    for request in new:
        assert request.prompt[: at + 1] == old.prompt[: at + 1]
        assert request.prompt[-len(follows[:12]) :] == follows[:12]
        assert request.score_from == old.score_from == at + 1


# Long texts

SHORT = st.sampled_from(["a", "of", "in", "x", "is"])


@settings(max_examples=25)
@given(words=st.lists(SHORT, min_size=0, max_size=90), canvas_len=st.sampled_from([8, 16, 20]))
def test_every_word_is_judged_exactly_once(words: list[str], canvas_len: int) -> None:
    """All of them are disliked, and there are windows for all: none is missed, none comes twice."""
    text = " ".join(words)
    model = Taste(task_context(canvas_len=canvas_len), dislikes=text + " " + text, offers=" a")
    found = run(model, text, windows=64)
    assert found.num_windows == len(words)
    watched = {
        len(one.prompt) - 1 + at for one in looks(model) for at in (one.pinned.watch if one.pinned else ())
    }
    assert watched == set(range(len(encode(text))))


@pytest.mark.parametrize("at", [0, 1, 11, 12, 13, 15, 16, 17, 40, 98, 99])
@pytest.mark.parametrize("max_positions", [1024, 90])
def test_one_slip_is_found_wherever_it_stands_in_a_long_text(at: int, max_positions: int) -> None:
    """Where the context is too short for the text, its end is kept before each canvas."""
    words = ["the", *["of"] * 99]
    words[at] = "bytes"
    text = " ".join(words)
    task = task_context(max_positions=max_positions)
    model = Taste(task, dislikes=" bytes", offers="the" if at == 0 else " of", knows="the")
    found = run(model, text, closeness=1.0)
    words[at] = "the" if at == 0 else "of"
    assert found.text == " ".join(words)
    assert found.num_windows == len(found.changes) == 1
    assert max(len(one.prompt) for one in model.written) <= max_positions - CANVAS


def test_a_text_is_read_with_all_the_context_there_is() -> None:
    text = " ".join(["of"] * 200)
    tokens = encode(text)
    task = task_context(max_positions=100)
    model = Taste(task, knows=text)
    run(model, text)
    room = 100 - 1 - 2 * CANVAS - 12
    begins = range(0, len(tokens) - CANVAS + 12, 12)
    assert [one.prompt for one in looks(model)] == [
        (BOS, *tokens[max(0, begin - room) : begin]) for begin in begins
    ]


def test_a_word_longer_than_a_canvas_is_left_as_it_is() -> None:
    text = "x = a12345678901234567 in the file in the file in the file."
    model = Taste(task_context(), offers=" of", knows="x =")
    assert run(model, text, closeness=1.0).text == text


def test_a_sentence_in_a_script_of_bytes_is_not_one_word() -> None:
    """Text that the model cannot read costs nats for every byte; leaving it out must not pay."""
    text = "日本語の文章を直すのは難しい"

    assert encode(text)[0] in TOKENIZER.byte_ids
    model = Taste(task_context(canvas_len=64), offers=" the")
    assert run(model, text).text == text


# Nothing, and what is refused


@pytest.mark.parametrize("around", [{}, {"before": "We count. ", "after": " The end."}])
def test_nothing_stays_nothing_and_asks_nothing(around: dict[str, str]) -> None:
    model = Taste(task_context(), dislikes=" the", offers=" of")
    found = run(model, "", **around)
    assert (found.text, found.changes, found.num_windows, found.forwards) == ("", (), 0, 0)
    assert model.rounds == []


@pytest.mark.parametrize("text", ["a\u2581b", "\u2581"])
def test_a_text_that_the_tokenizer_cannot_give_back_is_refused(text: str) -> None:
    with pytest.raises(
        InputError, match="does not give this text back as it is; it cannot be edited in place"
    ):
        run(Taste(task_context()), text)


def test_more_context_than_the_model_has_is_refused_by_name() -> None:
    task = task_context(max_positions=100, template=TEMPLATE)
    for more in ({"before": "of " * 60}, {"instruction": "of " * 60}):
        with pytest.raises(InputError, match="leave no room in this model's context; shorten them"):
            run(Taste(task), TEXT, **more)  # type: ignore[arg-type]


def test_an_instruction_that_nobody_could_read_is_not_dropped_in_silence() -> None:
    model = Taste(task_context(), dislikes=" bytes", offers=" lines")
    with pytest.raises(InputError, match="template"):
        run(model, TEXT, "Say lines.")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"windows": 0}, "windows is 0; it must be a whole number from 1 to 64"),
    ({"windows": 65}, "windows is 65"),
    ({"windows": True}, "windows is True"),
    ({"windows": 1.0}, "windows is 1.0"),
    ({"suspicion": -1}, "suspicion is -1; it must be a number of 0 or more"),
    ({"suspicion": None}, "suspicion is None"),
    ({"suspicion": float("nan")}, "suspicion is nan"),
    ({"closeness": -0.1}, "closeness is -0.1"),
    ({"closeness": "6"}, "closeness is '6'"),
    ({"gain": float("inf")}, "gain is inf"),
    ({"gain": True}, "gain is True"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_an_option_that_means_nothing_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        EditOptions(**options)
    assert str(refused.value).startswith(message)


def test_options_of_the_caller_reach_the_engine() -> None:
    model = Taste(task_context(params=GenerationParams(top_k=3), adapter="blue"), dislikes=" bytes")
    run(model, TEXT)
    every = [*model.written, *model.scored]
    assert {one.adapter for one in every} == {"blue"}
    assert {one.params.top_k for one in model.written} == {3}


def test_the_same_edit_twice_is_the_same() -> None:
    first, second = (run(Taste(task_context(), dislikes=" bytes", offers=" lines"), TEXT) for _ in range(2))
    assert first == second
    assert not first.changes, "a word is not replaced without an instruction"
