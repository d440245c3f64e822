"""Small scenes: whole sentences whose words fit, and topics that are held out as a whole."""

from __future__ import annotations

import re

import pytest

from recipes.english.entry import SPLITS
from recipes.english.prose import is_sentence, sentences
from recipes.english.scenes import TOPICS, WORDS, make_scene, scene_entries

COUNT = 3000


def test_a_scene_is_a_function_of_its_number_and_seed() -> None:
    assert make_scene(5) == make_scene(5)
    assert make_scene(5) != make_scene(5, seed=1)
    assert [entry.name for entry in scene_entries(3)] == [make_scene(number).name for number in range(3)]


def test_scenes_are_whole_sentences_without_slots() -> None:
    for number in range(COUNT):
        entry = make_scene(number)
        assert not re.search(r"[{}()|]|\?\?|  ", entry.text), entry.text
        assert not re.search(r"\b[Aa] [aeiou]|\b[Aa]n [^aeiouh]", entry.text), entry.text
        for sentence in sentences(entry.text):
            assert sentence[0].isupper() or sentence[0] == '"', sentence
            assert sentence[-1] in '.!?"', sentence


def test_most_sentences_of_scenes_count_as_prose() -> None:
    texts = [sentence for number in range(COUNT) for sentence in sentences(make_scene(number).text)]
    assert sum(map(is_sentence, texts)) > 0.95 * len(texts)


def test_names_and_things_of_answers_are_those_of_the_scene() -> None:
    asked = 0
    own = {word.lower() for words in WORDS.values() for word in words if " " not in word}
    for number in range(COUNT):
        entry = make_scene(number)
        for question, answer in entry.chats:
            asked += 1
            assert question.endswith("?"), question
            assert answer.endswith((".", '."', "!")), answer
            known = set(re.findall(r"[a-z]+", f"{entry.text} {question}".lower()))
            assert set(re.findall(r"[a-z]+", answer.lower())) & own <= known, entry
    assert asked > COUNT / 2


def test_every_topic_has_enough_to_say_and_every_list_is_used() -> None:
    assert len(TOPICS) >= 40
    for name, topic in TOPICS.items():
        for parts, least in ((topic.openings, 5), (topic.events, 12), (topic.endings, 5)):
            assert len(set(parts)) == len(parts) >= least, name
        assert all("{name}" in opening.lower() for opening in topic.openings), name
    used = {
        slot.lower().rstrip("23")
        for topic in TOPICS.values()
        for text in all_texts(topic)
        for slot in slots(text)
    }
    roles = {"name", "he", "him", "his", "friend", "fhe", "fhim", "fhis"}
    assert used <= set(WORDS) | roles


def all_texts(topic: object) -> list[str]:
    return [text for part in vars(topic).values() for text in part]


def slots(text: str) -> list[str]:
    return re.findall(r"\{(\w+)\}", text)


def test_held_out_scenes_are_of_topics_that_training_has_not() -> None:
    by_split: dict[str, set[str]] = {split: set() for split in SPLITS}
    for number in range(COUNT):
        entry = make_scene(number)
        by_split[entry.split].add(entry.name.partition(".")[0])
    assert not by_split["train"] & by_split["held_out"]
    assert len(by_split["held_out"]) >= 2


@pytest.mark.parametrize("slot", sorted(WORDS))
def test_no_word_stands_twice_in_a_list(slot: str) -> None:
    assert len(set(WORDS[slot])) == len(WORDS[slot])
