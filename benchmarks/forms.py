"""Records out of messages that training has not seen: free, constrained, left to right.

    python -m benchmarks.forms MODEL             (--messages N of each split; --splits S ...; --ways W ...)

A record counts if all fields are right; a field counts by itself. One message at a time. Constrained: to the
schema, and what is copied to words of the message.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks import record
from dgemma.evaluation.intervals import wilson
from dgemma.forms.record_types import any_schema, grounded, record_schema
from dgemma.language_model import LanguageModel
from dgemma.loading import load
from recipes.forms.messages import SPLITS, Message, Split, make_message

WAYS: dict[str, dict[str, Any]] = {
    "free": {},
    "constrained": {},
    "left to right": {"decode": "causal", "temperature": 0},
    "left to right, constrained": {"decode": "causal", "temperature": 0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--messages", type=int, default=200)
    parser.add_argument("--splits", nargs="*", choices=SPLITS, default=list(SPLITS[1:]))
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--suffix", default="", help="of the result file's name")
    args = parser.parse_args()
    lm = load(args.model)
    findings: dict[str, Any] = {"model": args.model, "messages": args.messages}
    for split in args.splits:
        found = findings[split] = measure(lm, split, args.messages, args.ways)
        for way in args.ways:
            row = {name: value for name, value in found[way].items() if name != "wrong"}
            print(split, way, row, flush=True)
        print(split, "left to right takes times as long as", found["ratios"], flush=True)
    record.write("forms", findings, args.suffix)


def measure(lm: LanguageModel, split: Split, count: int, ways: Sequence[str]) -> dict[str, Any]:
    """All ways on each message in turn, so that whatever else the machine does falls on all of them."""
    tallies = {way: Tally() for way in ways}
    for way in ways:  # compilation and first use are not counted
        extract(lm, make_message("train", 0, seed=1), way)
    for number in range(count):
        message = make_message(split, number, seed=1)
        for at in range(len(ways)):
            way = ways[(number + at) % len(ways)]
            began = time.perf_counter()
            found, used = extract(lm, message, way)
            tallies[way].add(message, found, used, time.perf_counter() - began)
    found = {way: tally.summary() for way, tally in tallies.items()}
    slow = tallies.get("left to right")
    ratios = {
        way: quartiles([a / b for a, b in zip(slow.seconds, tally.seconds, strict=True)])
        for way, tally in tallies.items()
        if slow is not None and tally is not slow
    }
    return {**found, "ratios": ratios}


@dataclass
class Tally:
    """What one way found."""

    exact: int = 0
    fields: int = 0
    right: int = 0
    forwards: int = 0
    seconds: list[float] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)

    def add(self, message: Message, found: Any, forwards: int, seconds: float) -> None:
        expected = message.expected
        self.exact += found == expected
        if found != expected and len(self.wrong) < 5:
            self.wrong.append({"message": message.text, "record": expected, "found": found})
        self.fields += len(expected)
        values = found if isinstance(found, dict) else {}
        self.right += sum(key in values and values[key] == value for key, value in expected.items())
        self.forwards += forwards
        self.seconds.append(seconds)

    def summary(self) -> dict[str, Any]:
        count = len(self.seconds)
        return {
            "exact": self.exact / count,
            "exact_interval": asdict(wilson(self.exact, count)),
            "fields": self.right / self.fields,
            "fields_interval": asdict(wilson(self.right, self.fields)),
            "forwards": self.forwards / count,
            "seconds": sum(self.seconds) / count,
            "seconds_quartiles": quartiles(self.seconds),
            "wrong": self.wrong,
        }


def quartiles(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in statistics.quantiles(values, n=4)]


def extract(lm: LanguageModel, message: Message, way: str) -> tuple[Any, int]:
    """The record, or None if the text is none, and the forwards it took."""
    options: dict[str, Any] = {"seed": 0, **WAYS[way]}
    if "constrained" in way:  # compiled for each message: that time counts
        schema = record_schema(message.type) if message.is_typed else any_schema()
        options["json_schema"] = grounded(schema, message.text)
    answer = lm.chat(message.prompt, **options)
    try:
        return json.loads(answer.text), answer.forwards
    except ValueError:
        return None, answer.forwards


if __name__ == "__main__":
    main()
