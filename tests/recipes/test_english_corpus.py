"""The corpus of English sentences: what is kept, what is left out, what is held out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.english.entry import Entry
from recipes.english.make_corpus import (
    RUN,
    common_entries,
    new_entries,
    new_scenes,
    runs_of,
    words,
    write_corpus,
)
from recipes.english.prose import is_sentence, plain
from recipes.english.scenes import scene_entries
from recipes.english.wordnet import wordnet_entries

GLOSSES = {
    "noun": '00000001 03 n 01 stone_wall 0 000 | a wall made of stones; "they built a stone wall"\n'
    "00000002 03 n 01 Rome 0 000 | the capital of Italy\n"
    "00000003 03 n 01 harmony 0 000 | compatibility in opinion and action\n",
    "verb": "  1 This file has a licence in front.\n"
    "00000004 03 v 01 abate 0 000 01 + 02 00 | become less in amount or intensity\n",
    "adj": "00000005 03 s 01 able(p) 0 000 | having the necessary means\n"
    "00000006 03 s 01 rude 0 000 | (vulgar) not to be taught\n",
    "adv": "",
}


def entry(name: str, text: str, source: str = "made") -> Entry:
    return Entry(source, name, text, f"What is {name}?")


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("A river is a large stream.", True),
        ('"A river is a stream," he said.', True),
        ("a river is a large stream.", False),
        ("A river is a large stream", False),
        ("Three words only.", False),
        ("See http://example.org for what it says.", False),
        ("Call frame.put(3) and wait for it.", False),
        ("Use the option --force to do it now.", False),
        ("Naïve words are left out of all this.", False),
        ("It was made by Ann Hill And Bob Dale And Eve Moss.", False),
        ("It has brackets (which do not close.", False),
        ("It was last changed on 2024-05-06 by hand.", False),
        ("The word " + "very " * 60 + "long.", False),
    ],
)
def test_what_reads_as_a_sentence(text: str, kept: bool) -> None:
    assert is_sentence(text) == kept


def test_quotes_and_dots_are_plain() -> None:
    assert plain("“quoted”  `code` , and a…") == "\"quoted\" 'code', and a..."


def test_glosses_become_sentences(tmp_path: Path) -> None:
    for part, lines in GLOSSES.items():
        (tmp_path / f"data.{part}").write_text(lines)
    assert [(found.question, found.text) for found in wordnet_entries(tmp_path)] == [
        ("What is a stone wall?", "A stone wall is a wall made of stones. They built a stone wall."),
        ("What is a harmony?", "Harmony means compatibility in opinion and action."),
        ("What does abate mean?", "To abate is to become less in amount or intensity."),
        ("What does able mean?", "Able means having the necessary means."),
    ]


def test_an_entry_ends_before_a_sentence_with_a_rare_word() -> None:
    common = [entry(str(number), "The tool is a part of the set that we all use.") for number in range(20)]
    mixed = entry("x", "The tool is a set that we all use. A quux is a frob of the set.")
    rare = entry("y", "A quux is a frob of the set. The tool is a part of the set that we all use.")
    kept = list(common_entries([*common, mixed, rare]))
    assert len(kept) == 21
    assert kept[-1].text == "The tool is a set that we all use."
    assert kept[-1].question == mixed.question


def test_held_out_entries_say_what_no_training_entry_says() -> None:
    halves = ["abcdefghij"[number % 10] * (number // 200 + 1) for number in range(2000)]
    entries = [
        entry(f"{number}", f"This is the text of entry {half} in a long row {half} of such {half} texts.")
        for number, half in enumerate(halves)
    ]
    kept = list(new_entries(entries))
    texts = {split: [one.text for one in kept if one.split == split] for split in ("train", "held_out")}
    assert texts["train"]
    seen = set().union(*map(runs_of, texts["train"]))
    for text in texts["held_out"]:
        assert len(runs_of(text) & seen) <= 0.1 * len(runs_of(text))
    assert len(set(texts["train"])) == len(texts["train"])


def test_runs_are_of_five_words() -> None:
    text = "One two three four five six."
    assert len(runs_of(text)) == len(words(text)) - RUN + 1
    assert len(runs_of("one two")) == 1


def test_entries_are_written_as_records_and_chats(tmp_path: Path) -> None:
    scene = Entry("made", "b", "B is second.", chats=(("What is B?", "It is second."),))
    write_corpus(tmp_path, [entry("a", "A is the first. It is old."), scene])
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == ["A is the first. It is old.", "B is second."]
    chats = [json.loads(line) for line in (tmp_path / "chats/train.jsonl").read_text().splitlines()]
    assert chats == [
        {"prompt": "What is a?", "response": "A is the first. It is old."},
        {"prompt": "B is second. What is B?", "response": "It is second."},
    ]


def test_new_scenes_are_no_training_scenes_and_of_topics_in_training() -> None:
    scenes = list(scene_entries(2_000))
    found = list(new_scenes(scenes, 100))
    assert len({scene.text for scene in found}) == 100
    assert {scene.text for scene in found}.isdisjoint(scene.text for scene in scenes)
    assert {scene.split for scene in found} == {"train"}
