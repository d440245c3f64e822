"""Messages and their records, made: message n of a split is a function of (seed, n) alone.

Splits, each with what it has that training has not:

| split | templates | words | pairs of words |
|---|---|---|---|
| train | known | known | known |
| values | known | an eighth, by hash | any |
| templates | held out | known | known |
| blind | held out, written without a look at any other | known | known |
| combinations | known | known | an eighth, by hash |

A pair is the first two texts of a record, such as a first and a last name: both occur in training, never
together.
"""

from __future__ import annotations

import datetime
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dgemma.forms.record_types import LEVELS, RECORD_TYPES, make_prompt, to_text
from recipes.forms import words
from recipes.forms.phrases import FRAGMENTS, SENTENCES
from recipes.forms.templates import (
    AFTER,
    BEFORE,
    BLIND,
    FRAGMENT_SEPARATORS,
    HELD_OUT,
    LABELS,
    MARKS,
    NEVER_LEFT_OUT,
    SEPARATORS,
    TRAINED,
)
from recipes.forms.words import is_held_out

Split = Literal["train", "values", "templates", "blind", "combinations"]
SPLITS: tuple[Split, ...] = ("train", "values", "templates", "blind", "combinations")

_NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_QUANTITIES: dict[str, tuple[tuple[str, ...], str, tuple[float, float], int]] = {
    # how units are written, the unit in the record, range, digits after the point
    "temperature": (("°C", " °C", " degrees", " C", " degrees Celsius"), "C", (-30, 95), 1),
    "humidity": (("%", " %", " percent"), "%", (1, 99), 0),
    "pressure": ((" hPa", "hPa", " mbar"), "hPa", (940, 1060), 0),
    "weight": ((" kg", "kg", " kilos", " kilograms"), "kg", (1, 400), 1),
    "speed": ((" km/h", "km/h", " kmh"), "km/h", (1, 240), 0),
    "voltage": ((" V", "V", " volts"), "V", (1, 400), 1),
    "height": ((" cm", "cm", " centimetres"), "cm", (1, 250), 0),
    "power": ((" W", "W", " watts"), "W", (1, 3000), 0),
    "noise": ((" dB", "dB", " decibels"), "dB", (20, 120), 0),
}
_HOSTS = ("web", "db", "node", "host", "srv")
_MONEY = {
    "EUR": ("€{}", "{} EUR", "{} euros", "EUR {}"),
    "USD": ("${}", "{} USD", "{} dollars", "USD {}"),
    "GBP": ("£{}", "{} GBP", "{} pounds", "GBP {}"),
    "CHF": ("CHF {}", "{} CHF", "{} francs"),
}
LIST, COMPOSED = -1, -2
_LIST_SHARE, _COMPOSED_SHARE = 0.15, 0.3  # of the messages; the others have a template of TRAINED
_STRANGE_SHARE = 0.15  # of the words of lists in training
_SLOT = re.compile(r"\{(\w+)\}")
_CHOICE = re.compile(r"\(([^()|{}]*\|[^()]*)\)")
_HAS_OTHER = re.compile(r"\[[^()|]*(\([^()]*\)[^()|]*)*\|\w+:?\]$")


@dataclass(frozen=True)
class Message:
    type: str
    template: (
        int  # of its type; the held-out ones of a split are counted after the others; or LIST, or COMPOSED
    )
    text: str
    record: dict[str, Any]
    today: datetime.date
    words: tuple[str, ...]  # those of the lists that it was made of
    is_typed: bool = True  # the prompt names the type; else the answer does

    @property
    def prompt(self) -> str:
        return make_prompt(self.type if self.is_typed else None, self.text, self.today)

    @property
    def expected(self) -> dict[str, Any]:
        """What the model should answer."""
        return self.record if self.is_typed else {"type": self.type, **self.record}

    @property
    def answer(self) -> str:
        return to_text(self.expected)


def make_message(split: Split, number: int, *, seed: int = 0, type_: str | None = None) -> Message:
    """Message `number` of a split. Another seed has other messages of the same splits."""
    draw = random.Random(f"{split} {seed} {number}")
    while True:
        found = _Writer(split, draw).write(type_ or draw.choice(list(RECORD_TYPES)))
        if found is not None:
            return found


class _Writer:
    """One message: draws values, and remembers which of them the text has."""

    def __init__(self, split: Split, draw: random.Random) -> None:
        self._split, self._draw = split, draw
        self._words: list[str] = []
        self._today = datetime.date(2024, 1, 1) + datetime.timedelta(days=draw.randrange(1800))

    def write(self, type_: str) -> Message | None:
        """None: not of this split after all."""
        number, template = self._template(type_)
        slots = self._slots(type_)
        used: set[str] = set()
        text = self._fill(self._without_some(template), slots, used)
        said = {_FIELD_OF.get(slot, slot): slots[slot][1] for slot in used}
        said |= {
            slot: value for slot, (surface, value) in slots.items() if not surface
        }  # goes without saying
        said |= said.pop("street_number", {})
        record = {name: said.get(name) for name in RECORD_TYPES[type_]["properties"]}
        if type_ == "appointment":
            record["people"] = record["people"] or []
        said_words = [word for word in self._words if word.lower() in text.lower()]
        if self._split == "values":
            if not any(map(is_held_out, said_words)):
                return None
        elif is_held_out_pair(said_words) != (self._split == "combinations"):
            return None
        return Message(
            type_,
            number,
            self._between_other_text(text),
            record,
            self._today,
            tuple(said_words),
            is_typed=self._draw.random() < 0.8,
        )

    # Words

    def _word(self, choices: Sequence[str]) -> str:
        """One that the split may use; of `values`, half of them are held out."""
        wants = self._split == "values" and self._draw.random() < 0.6
        is_strange = self._split == "train" and self._draw.random() < _STRANGE_SHARE
        while True:
            word = self._draw.choice(choices)
            if is_strange:
                word = self._strange(word, is_service=choices is words.SERVICES)
            # In a record "the canteen" is "canteen".
            forms = (word.lower(), word.removeprefix("the ")) if self._split == "train" else ()
            if is_held_out(word) == wants and not any(map(is_held_out, forms)):
                self._words.append(word)
                return word

    def _strange(self, word: str, *, is_service: bool) -> str:
        """Other words in its place, so that what a field is follows from the sentence, not from its words."""
        return re.sub(
            r"[^\W\d_]{3,}",
            lambda match: match[0] if match[0] in ("the", "and") else self._other_word(match[0], is_service),
            word,
        )

    def _other_word(self, word: str, is_service: bool) -> str:
        if self._draw.random() < 0.5:
            other = words.made_up(self._draw)
        else:
            other = self._draw.choice((words.THINGS, words.THINGS, words.QUALITIES_OF_ALL, words.DONE))
            other = self._draw.choice(other).split()[-1]
            kind = self._draw.random()
            if kind < 0.3 and is_service:
                other += "s"
            elif kind < 0.5:
                other = other.rstrip("e").removesuffix("ed") + "ing"
        return other.title() if word[0].isupper() else other

    def _person(self) -> str:
        return f"{self._word(words.FIRST_NAMES)} {self._word(words.LAST_NAMES)}"

    def _or_thing(self, choices: Sequence[str], *forms: str, is_short: bool = False) -> str:
        """One of the list; or, as often, any thing in one of these forms."""
        if self._draw.random() < 0.5:
            return self._word(choices)
        while True:
            thing = self._word(words.THINGS) if is_short else self._thing()
            made = self._draw.choice(forms).format(thing)
            # Two words of training must not make up one that is held out, such as "light bulb".
            if self._split != "train" or not (is_held_out(made) or is_held_out(made.title())):
                return made

    def _thing(self) -> str:
        """In training a quarter has a word before it, as in "light bulb": more than any list holds."""
        if self._split != "train" or self._draw.random() < 0.75:
            return self._word(words.THINGS)
        before = self._draw.choice((words.QUALITIES_OF_ALL, words.THINGS))
        return f"{self._word(before)} {self._word(words.THINGS)}"

    def _fault(self) -> str:
        kinds = [f"{{}} {self._draw.choice(words.FAULT_KINDS)}"]
        if self._split == "train":
            quality, done = self._word(words.QUALITIES_OF_ALL), self._word(words.DONE)
            kinds += [
                f"{{}} is {quality}", f"{{}} was {done}", f"{{}} {done}", f"{quality} {{}}",
                f"no {{}} {done}", f"{{}} is not {done}", f"{{}} has {done}", "cannot find {}",
                f"{quality} {{}} {done}",
            ]  # fmt: skip
        return self._or_thing(words.FAULTS, *kinds)

    def _city(self) -> tuple[str, str]:
        name = self._word([name for name, _ in words.CITIES])
        country = dict(words.CITIES).get(name) or self._draw.choice(list(words.COUNTRIES))
        return name, words.COUNTRIES[country]

    def _company(self) -> str:
        stem = self._or_thing(words.COMPANY_STEMS, "{}", is_short=True).title()
        return f"{stem} {self._draw.choice(words.COMPANY_KINDS)}"

    # Templates

    def _template(self, type_: str) -> tuple[int, str]:
        known = TRAINED[type_]
        if self._split in ("templates", "blind"):
            unknown = HELD_OUT[type_] if self._split == "templates" else BLIND[type_]
            number = self._draw.randrange(len(unknown))
            return len(known) + number, unknown[number]
        kind = self._draw.random()
        if kind < _LIST_SHARE:
            return LIST, self._list_of_fields(type_)
        if kind < _LIST_SHARE + _COMPOSED_SHARE:
            return COMPOSED, self._composed(type_)
        number = self._draw.randrange(len(known))
        return number, known[number]

    def _list_of_fields(self, type_: str) -> str:
        """A template with the fields of a type in any order."""
        labels = LABELS[type_]
        slots = [slot for slot in labels if slot in NEVER_LEFT_OUT or self._draw.random() < 0.65]
        self._draw.shuffle(slots)
        mark, is_capital = self._draw.choice(MARKS), self._draw.random() < 0.5
        has_labels = self._draw.random() < 0.7
        parts = []
        for slot in slots:
            label = self._draw.choice(labels[slot])
            label = label.capitalize() if is_capital else label
            # A slot with a capital letter would be changed: `{Title}` is a title at the start of a sentence.
            parts.append(f"{label}{mark}{{{slot}}}" if has_labels else f"{{{slot}}}")
        return self._draw.choice(SEPARATORS).join(parts)

    def _composed(self, type_: str) -> str:
        """A template of phrases: an opener, and some of the other fields in any order."""
        is_prose = self._draw.random() < 0.5
        openers, phrases = (SENTENCES if is_prose else FRAGMENTS)[type_]
        opener = self._draw.choice(openers)
        parts = [
            self._draw.choice(phrases[field])
            for field in phrases
            if not _says(opener, field) and self._draw.random() < 0.6
        ]
        self._draw.shuffle(parts)
        # Most messages begin with what they are about.
        at = 0 if self._draw.random() < 0.7 else self._draw.randrange(len(parts) + 1)
        parts.insert(at, opener)
        return (" " if is_prose else self._draw.choice(FRAGMENT_SEPARATORS)).join(parts)

    def _without_some(self, template: str) -> str:
        """The template with each part in brackets kept or left out, and one of each choice."""
        kept = []
        for part in re.split(r"((?<!\\)\[.*?(?<!\\)\])", template, flags=re.DOTALL):
            is_optional = part.startswith("[")
            if not is_optional:
                kept.append(part)
                continue
            first, _, other = part[1:-1].rpartition("|") if _HAS_OTHER.match(part) else (part[1:-1], "", "")
            kept.append(first if self._draw.random() < 0.65 else other)
        chosen = _CHOICE.sub(lambda match: self._draw.choice(match[1].split("|")), "".join(kept))
        return chosen.replace("\\[", "[").replace("\\]", "]")

    def _fill(self, template: str, slots: dict[str, tuple[str, Any]], used: set[str]) -> str:
        """Slots filled in; typing errors only in the words between them."""
        parts = _SLOT.split(template)
        has_typo = self._draw.random() < 0.15
        for at, part in enumerate(parts):
            if at % 2 == 0:
                parts[at] = self._with_typo(part) if has_typo else part
                continue
            used.add(part.lower())
            surface = slots[part.lower()][0]
            is_first = part[0].isupper() and not part.isupper()
            parts[at] = (
                surface.upper()
                if part.isupper()
                else surface[:1].upper() + surface[1:]
                if is_first
                else surface
            )
        return "".join(parts).strip()

    def _with_typo(self, text: str) -> str:
        found = list(re.finditer(r"[a-z]{4,}", text))
        if not found:
            return text
        match = self._draw.choice(found)
        at = match.start() + 1 + self._draw.randrange(len(match.group()) - 2)
        kind = self._draw.randrange(3)
        if kind == 0:  # a letter missing
            return text[:at] + text[at + 1 :]
        if kind == 1:  # a letter twice
            return text[:at] + text[at] + text[at:]
        return text[:at] + text[at + 1] + text[at] + text[at + 2 :]  # two exchanged

    def _between_other_text(self, text: str) -> str:
        """With sentences around it that have nothing to do with the record."""
        small, other = str(self._draw.randrange(2, 60)), self._draw.choice(words.FIRST_NAMES)
        large = str(self._draw.randrange(1000, 10_000))
        before = self._draw.choice(BEFORE) if self._draw.random() < 0.25 else ""
        after = self._draw.choice(AFTER) if self._draw.random() < 0.25 else ""
        filled = (part.format(small=small, large=large, other=other) for part in (before, after))
        first, last = filled
        return f"{first} {text}".strip() if not last else f"{first} {text} {last}".strip()

    # Values: how they are written, and what the record has

    def _slots(self, type_: str) -> dict[str, tuple[str, Any]]:
        found: dict[str, tuple[str, Any]] = getattr(self, f"_{type_}")()
        found["other"] = (self._draw.choice(words.FIRST_NAMES), None)
        return found

    def _appointment(self) -> dict[str, tuple[str, Any]]:
        title = self._or_thing(words.TITLES, f"{{}} {self._draw.choice(words.TITLE_KINDS)}")
        place = self._place()
        people = [
            self._draw.choice((self._person, lambda: self._word(words.FIRST_NAMES)))()
            for _ in range(self._few(3))
        ]
        date, time = self._date(), self._time()
        minutes = self._minutes()
        return {
            "title": (title, title),
            "date": (date[0], date[2]),
            "bare_date": (date[1], date[2]),
            "time": (f"at {time[0]}", time[1]),
            "minutes": (f"for {minutes[0]}", minutes[1]),
            "bare_minutes": minutes,
            "bare_time": time,
            "place": place,
            "bare_place": (place[0].removeprefix("at ").removeprefix("in "), place[1]),
            "people": (_listed(people), people),
        }

    def _place(self) -> tuple[str, str]:
        kind = self._draw.randrange(3)
        if kind == 0:
            place = self._or_thing(words.PLACES, "the {}")
            return f"at {place}", place.removeprefix("the ")
        if kind == 1:
            city = self._city()[0]
            return f"in {city}", city
        room = f"room {self._draw.randrange(1, 500)}"
        return f"in {room}", room

    def _order(self) -> dict[str, tuple[str, Any]]:
        customer = self._draw.choice((self._person, self._company))()
        currency = self._draw.choice(list(_MONEY))
        has_prices = self._draw.random() < 0.5
        style = self._draw.choice(_MONEY[currency])
        texts, items = [], []
        for _ in range(self._few(3)):
            name, count = (
                self._or_thing(words.ITEMS, "{}", f"{self._draw.choice(words.QUALITIES)} {{}}"),
                self._draw.choice((1, 2, 3, 4, 5, 6, 8, 10, 12, 20, 25, 40)),
            )
            price = self._amount() if has_prices else None
            texts.append(self._item(name, count, price, style))
            items.append({"name": name, "count": count, "price": price})
        date = self._date()
        return {
            "customer": (customer, customer),
            "items": (_listed(texts), items),
            "currency": ("", currency if has_prices else None),
            "due": (date[1], date[2]),
            "due_on": (date[0], date[2]),
        }

    def _item(self, name: str, count: int, price: float | None, style: str) -> str:
        plural = name if count == 1 else f"{name}s"
        written = _NUMBERS[count - 1] if count <= len(_NUMBERS) and self._draw.random() < 0.3 else str(count)
        if count == 1 and self._draw.random() < 0.4:
            written = "an" if name[0] in "aeiou" else "a"
        text = f"{count} x {name}" if self._draw.random() < 0.25 else f"{written} {plural}"
        if price is None:
            return text
        amount = style.format(f"{price:.2f}" if price % 1 or self._draw.random() < 0.3 else f"{price:.0f}")
        return (
            f"{text} {self._draw.choice(('at', 'for'))} {amount} each"
            if self._draw.random() < 0.7
            else f"{text} ({amount})"
        )

    def _amount(self) -> float | int:
        whole = self._draw.randrange(1, 400)
        cents = self._draw.choice((0, 0, 50, 99, 95, 25, self._draw.randrange(100)))
        return whole if not cents else round(whole + cents / 100, 2)

    def _contact(self) -> dict[str, tuple[str, Any]]:
        name, company, city = self._person(), self._company(), self._city()[0]
        first, last = name.lower().split(" ", 1)
        host = company.lower().replace(" ", "")
        email = self._draw.choice(
            (
                f"{first}.{last}@{host}.com",
                f"{first[0]}.{last}@{host}.org",
                f"{first}@{host}.net",
                f"info@{host}.com",
            )
        )
        return {
            "name": (name, name),
            "company": (company, company),
            "email": (email, email),
            "phone": self._phone(),
            "city": (city, city),
        }

    def _phone(self) -> tuple[str, str]:
        digits = "".join(self._draw.choice("0123456789") for _ in range(7))
        kind = self._draw.randrange(4)
        area = str(self._draw.randrange(200, 999))
        if kind == 0:
            country = self._draw.choice(("44", "49", "33", "1", "41", "46"))
            return f"+{country} {area} {digits}", f"+{country}{area}{digits}"
        if kind == 1:
            return f"({area}) {digits[:3]}-{digits[3:]}", f"{area}{digits}"
        if kind == 2:
            return f"0{area} {digits[:3]} {digits[3:]}", f"0{area}{digits}"
        return f"0{area}/{digits}", f"0{area}{digits}"

    def _measurement(self) -> dict[str, tuple[str, Any]]:
        quantity = self._draw.choice(list(_QUANTITIES))
        units, unit, (low, high), places = _QUANTITIES[quantity]
        drawn = round(self._draw.uniform(low, high), places)
        value: float | int = int(drawn) if drawn == int(drawn) else drawn
        kind = self._draw.choice(("sensor", "probe", "tank", "station", "room", "line"))
        sensor = f"{kind} {self._draw.choice('ABCDEFGHKLMNPRSTX')}{self._draw.randrange(1, 100)}"
        if self._draw.random() < 0.4:
            sensor = f"{self._city()[0]} {kind}"
        date, time = self._date(), self._time()
        return {
            "sensor": (sensor, sensor),
            "quantity": (quantity, quantity),
            "reading": (f"{value}{self._draw.choice(units)}", value),
            "unit": ("", unit),
            "date": (date[0], date[2]),
            "bare_date": (date[1], date[2]),
            "time": (f"at {time[0]}", time[1]),
            "time_first": (f"{time[0]}", time[1]),
            "bare_time": time,
        }

    def _log(self) -> dict[str, tuple[str, Any]]:
        level = self._draw.choice(LEVELS)
        service = self._or_thing(words.SERVICES, "{}", is_short=True)
        fault = self._fault()
        code = self._draw.choice(
            (200, 400, 401, 403, 404, 408, 409, 429, 500, 502, 503, self._draw.randrange(1, 9999))
        )
        day = self._today - datetime.timedelta(days=self._draw.randrange(4))
        time = f"{self._draw.randrange(24):02}:{self._draw.randrange(60):02}"
        clock = f"{time}:{self._draw.randrange(60):02}" if self._draw.random() < 0.5 else time
        pid = str(self._draw.randrange(1, 40_000))
        return {
            "level": (level, level),
            "iso_date": (day.isoformat(), day.isoformat()),
            "clock": (clock, time),
            "service": (service, service),
            "code": (str(code), code),
            "fault": (fault, fault),
            "pid": (pid, None),
            "host": (f"{_HOSTS[int(pid) % len(_HOSTS)]}{int(pid) % 7 + 1}", None),
        }

    def _address(self) -> dict[str, tuple[str, Any]]:
        name = self._draw.choice((self._person, self._company))()
        stem = self._or_thing(words.STREETS, "{}", is_short=True).title()
        street = f"{stem} {self._draw.choice(words.STREET_KINDS)}"
        number = f"{self._draw.randrange(1, 250)}{self._draw.choice(('', '', '', 'a', 'b'))}"
        city, country = self._city()
        letters = "ABCDEFGHKLMNPRSTW"
        postcode = self._draw.choice(
            (
                f"{self._draw.randrange(10_000, 99_999)}",
                f"{self._draw.choice(letters)}{self._draw.choice(letters)}{self._draw.randrange(1, 20)} "
                f"{self._draw.randrange(1, 9)}{self._draw.choice(letters)}{self._draw.choice(letters)}",
                f"{self._draw.randrange(1000, 9999)}",
            )
        )
        return {
            "name": (name, name),
            "street": (street, street),
            "number": (number, number),
            "street_number": (
                self._draw.choice((f"{street} {number}", f"{number} {street}")),
                {"street": street, "number": number},
            ),
            "postcode": (postcode, postcode),
            "city": (city, city),
            "country": (country, country),
        }

    def _few(self, most: int) -> int:
        return min(self._draw.randrange(1, most + 1), self._draw.randrange(1, most + 1))

    def _date(self) -> tuple[str, str, str]:
        """As part of a sentence, alone, and in the record."""
        # Training has more days that are looked up in the prompt: they are learned last.
        kind = self._draw.choice(_KINDS_OF_DATES) if self._split == "train" else self._draw.randrange(6)
        ahead = self._draw.randrange(1, 8)
        day = self._today + datetime.timedelta(days=ahead)
        if kind == 0 and ahead <= 1:
            kind = 1
        if kind == 0:
            written = _NUMBERS[ahead - 1] if self._draw.random() < 0.5 else str(ahead)
            return f"in {written} days", _WEEKDAYS[day.weekday()], day.isoformat()
        if kind == 1:
            day = self._today + datetime.timedelta(days=self._draw.randrange(2))
            word = "today" if day == self._today else "tomorrow"
            return word, word, day.isoformat()
        if kind == 2:
            word = _WEEKDAYS[day.weekday()]
            word = word if self._draw.random() < 0.7 else word[:3]
            return f"on {word}", word, day.isoformat()
        day = self._today + datetime.timedelta(days=self._draw.randrange(1, 200))
        month = _MONTHS[day.month - 1]
        if kind == 3:
            word = self._draw.choice((f"{day.day} {month}", f"{month} {day.day}", f"{day.day} {month[:3]}"))
            return f"on {word} {day.year}", f"{word} {day.year}", day.isoformat()
        if kind == 4:
            return f"on {day.isoformat()}", day.isoformat(), day.isoformat()
        written = f"{day.day}.{day.month}.{day.year}"
        return f"on {written}", written, day.isoformat()

    def _time(self) -> tuple[str, str]:
        hour, minute = (
            self._draw.randrange(24),
            self._draw.choice((0, 0, 15, 30, 45, self._draw.randrange(60))),
        )
        value = f"{hour:02}:{minute:02}"
        kind = self._draw.randrange(4)
        if kind == 0:
            half = "am" if hour < 12 else "pm"
            shown = (hour - 1) % 12 + 1
            space = self._draw.choice(("", " "))
            return (f"{shown}{space}{half}" if not minute else f"{shown}:{minute:02}{space}{half}"), value
        if kind == 1 and self._draw.random() < 0.3:
            return ("noon", "12:00") if self._draw.random() < 0.6 else ("midnight", "00:00")
        return (f"{hour}:{minute:02}" if self._draw.random() < 0.5 else value), value

    def _minutes(self) -> tuple[str, int]:
        kind = self._draw.randrange(4)
        if kind == 0:
            hours = self._draw.randrange(2, 6)
            return f"{_NUMBERS[hours - 1] if self._draw.random() < 0.5 else hours} hours", 60 * hours
        if kind == 1:
            return self._draw.choice(
                (("an hour", 60), ("half an hour", 30), ("1.5 hours", 90), ("1 hour", 60))
            )
        minutes = self._draw.choice((10, 15, 20, 25, 30, 40, 45, 50, 75, 90, 100))
        return f"{minutes} {self._draw.choice(('minutes', 'min'))}", minutes


_KINDS_OF_DATES = (0, 0, 0, 1, 2, 2, 2, 3, 4, 5)
# Slots that are another way to write a field.
_FIELD_OF = {
    "bare_date": "date", "bare_time": "time", "time_first": "time", "bare_minutes": "minutes",
    "reading": "value", "iso_date": "date", "clock": "time", "fault": "message", "bare_place": "place",
    "due_on": "due",
}  # fmt: skip


def is_held_out_pair(said: Sequence[str]) -> bool:
    """Whether the first two words of a message must not stand together in training."""
    return len(said) > 1 and is_held_out(*said[:2])


def _says(template: str, field: str) -> bool:
    return any(_FIELD_OF.get(slot, slot) == field for slot in map(str.lower, _SLOT.findall(template)))


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
