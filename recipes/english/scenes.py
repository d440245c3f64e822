"""Small scenes in plain words, made from sentences of one topic: who does what, where, with what.

Scene n of a seed is a function of (seed, n). Names and things stay the same throughout a scene, so that its
sentences speak of each other, and questions about a sentence have an answer in it.

A sentence is written with slots and choices: "{Name} (took|picked up) a {colour} {thing}." After ` ?? ` it
may have questions, each with its answer after ` || `.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from recipes.english.entry import Entry
from recipes.english.topic import Topic
from recipes.english.topics_away import AWAY
from recipes.english.topics_home import HOME

SOURCE = "scenes"
TOPICS: dict[str, Topic] = {**HOME, **AWAY}

_WOMEN = (
    "Ann", "Mary", "Jane", "Emma", "Lucy", "Rose", "Clara", "Alice", "Ella", "Nora", "Ruth", "Grace", "Sara",
    "Kate", "Eva", "Lily", "Anna", "Helen", "Julia", "Laura", "Maria", "Nina", "Olga", "Paula", "Rita",
    "Sophie", "Tina", "Vera", "Zoe", "Martha",
)  # fmt: skip
_MEN = (
    "Tom", "John", "Peter", "Paul", "Max", "Ben", "Sam", "Jack", "Henry", "Oscar", "Hugo", "Leo", "Simon",
    "David", "Martin", "Daniel", "Adam", "Frank", "George", "Harry", "Ivan", "Jacob", "Karl", "Luke", "Mark",
    "Nick", "Oliver", "Philip", "Robert", "Victor",
)  # fmt: skip
WORDS: dict[str, tuple[str, ...]] = {
    "animal": (
        "dog", "cat", "horse", "cow", "sheep", "goat", "pig", "hen", "duck", "goose", "rabbit", "mouse",
        "bird", "fox", "bear", "wolf", "deer", "frog", "snake", "owl", "donkey", "squirrel", "hedgehog",
        "parrot", "swan",
    ),
    "pet": ("dog", "cat", "rabbit", "parrot", "mouse", "hen", "goat", "pony", "puppy", "kitten", "turtle"),
    "thing": (
        "book", "box", "bag", "hat", "coat", "lamp", "chair", "table", "clock", "knife", "cup", "bowl",
        "basket", "blanket", "rope", "key", "letter", "map", "mirror", "candle", "bottle", "hammer", "ladder",
        "bucket", "umbrella", "ring", "coin", "picture", "bell", "drum", "flute", "kite", "ball", "doll",
        "wheel", "shovel", "broom", "pillow", "scarf", "pencil", "watch", "camera", "radio", "guitar",
    ),
    "tool": ("hammer", "saw", "knife", "shovel", "rope", "ladder", "needle", "brush", "nail", "axe", "rake"),
    "food": (
        "bread", "cheese", "soup", "rice", "fish", "meat", "cake", "butter", "honey", "jam", "salad", "milk",
        "porridge", "chocolate", "pasta", "fruit",
    ),
    "drink": ("water", "milk", "tea", "coffee", "juice", "lemonade", "hot chocolate"),
    "fruits": (
        "apples", "pears", "plums", "cherries", "grapes", "oranges", "lemons", "berries", "nuts", "carrots",
        "beans", "onions", "potatoes", "tomatoes", "mushrooms", "eggs",
    ),
    "flowers": ("roses", "tulips", "daisies", "lilies", "sunflowers", "violets", "poppies"),
    "place": (
        "the market", "the park", "the library", "the river", "the station", "the school", "the beach",
        "the forest", "the village", "the harbour", "the farm", "the museum", "the bakery", "the mill",
        "the church", "the bridge", "the lake", "the castle", "the garden", "the town", "the island",
        "the hospital", "the theatre", "the field",
    ),
    "room": ("the kitchen", "the bedroom", "the attic", "the cellar", "the hall", "the garage", "the office"),
    "spot": (
        "under the bed", "on the table", "behind the door", "in the drawer", "near the window", "on the roof",
        "under a tree", "in the grass", "next to the fire", "on the stairs", "in a corner", "on a shelf",
    ),
    "colour": ("red", "blue", "green", "yellow", "white", "black", "brown", "grey", "purple"),
    "size": ("small", "big", "large", "tiny", "long", "short", "heavy", "light"),
    "kind": ("old", "new", "beautiful", "broken", "strange", "simple", "expensive", "clean", "dirty"),
    "glad": ("happy", "glad", "proud", "cheerful", "delighted", "pleased"),
    "sad": ("sad", "tired", "angry", "afraid", "worried", "hungry", "lonely", "cold"),
    "weather": ("sunny", "rainy", "windy", "cold", "warm", "cloudy", "foggy", "snowy", "hot"),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "when": (
        "in the morning", "in the afternoon", "in the evening", "at night", "after lunch", "before dinner",
    ),
    "season": ("spring", "summer", "autumn", "winter"),
    "count": ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve", "twenty"),
    "family": (
        "mother", "father", "sister", "brother", "aunt", "uncle", "grandmother", "grandfather", "cousin",
    ),
    "job": (
        "teacher", "doctor", "baker", "farmer", "driver", "nurse", "painter", "sailor", "singer", "writer",
        "cook", "tailor", "gardener", "carpenter", "fisherman", "policeman", "postman", "shoemaker",
    ),
    "vehicle": ("car", "bus", "train", "boat", "bicycle", "cart", "ship", "taxi", "truck"),
    "stuff": ("wood", "glass", "paper", "stone", "iron", "clay", "wool", "leather", "gold", "silver"),
    "sport": ("football", "tennis", "chess", "cards", "golf", "hockey"),
}  # fmt: skip
_PRONOUNS = {True: ("she", "her", "her"), False: ("he", "him", "his")}
_SLOT = re.compile(r"\{(\w+)\}")
_CHOICE = re.compile(r"\(([^()|]*\|[^()]*)\)")


def scene_entries(count: int, *, seed: int = 0) -> Iterator[Entry]:
    for number in range(count):
        yield make_scene(number, seed=seed)


def make_scene(number: int, *, seed: int = 0) -> Entry:
    draw = random.Random(f"scene {seed} {number}")
    name = draw.choice(sorted(TOPICS))
    text, chats = _write(TOPICS[name], draw)
    return Entry(SOURCE, f"{name}.{number}", text, chats=chats, is_made=True)


def _write(topic: Topic, draw: random.Random) -> tuple[str, tuple[tuple[str, str], ...]]:
    """A scene, and questions about it with their answers."""
    words = _cast(draw)
    events = sorted(draw.sample(range(len(topic.events)), draw.randrange(1, min(4, len(topic.events)) + 1)))
    sentences = [draw.choice(topic.openings), *(topic.events[at] for at in events)]
    if draw.random() < 0.6:
        sentences.append(draw.choice(topic.endings))
    texts: list[str] = []
    chats: list[tuple[str, str]] = []
    for sentence in sentences:
        chosen = _CHOICE.sub(lambda match: draw.choice(match[1].split("|")), sentence)
        text, *questions = _filled(chosen, words, draw).split(" ?? ")
        texts.append(text)
        chats += [
            (question, answer) for question, _, answer in (part.partition(" || ") for part in questions)
        ]
    return " ".join(texts), tuple(chats)


def _cast(draw: random.Random) -> dict[str, str]:
    """Who there is, with their pronouns: {name} {he} {him} {his}, {friend} {fhe} {fhim} {fhis}."""
    found = {}
    taken: list[str] = []
    for role, prefix in (("name", ""), ("friend", "f")):
        is_woman = draw.random() < 0.5
        while (name := draw.choice(_WOMEN if is_woman else _MEN)) in taken:
            pass
        taken.append(name)
        he, him, his = _PRONOUNS[is_woman]
        found |= {role: name, f"{prefix}he": he, f"{prefix}him": him, f"{prefix}his": his}
    return found


def _filled(text: str, words: dict[str, str], draw: random.Random) -> str:
    """Slots filled in. {thing} is the same throughout a scene, {thing2} another; {Thing} has a capital."""

    def word(match: re.Match[str]) -> str:
        slot = match[1].lower()
        if slot not in words:
            choices = WORDS[slot.rstrip("23")]
            left = [choice for choice in choices if choice not in words.values()]
            words[slot] = draw.choice(left or choices)
        found = words[slot]
        return found[0].upper() + found[1:] if match[1][0].isupper() else found

    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", _SLOT.sub(word, text))
