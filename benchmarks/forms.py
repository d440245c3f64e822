"""Records out of messages: free, constrained to their schema, left to right; on what training has not seen.

    python -m benchmarks.forms MODEL             (--messages N of each split; --splits S ...; --ways W ...)

A record counts if all fields are right; a field counts by itself. One message at a time.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from typing import Any

from benchmarks import record
from dgemma.evaluation.intervals import wilson
from dgemma.forms.record_types import any_schema, record_schema
from dgemma.language_model import LanguageModel, load
from recipes.forms.messages import SPLITS, Message, make_message

WAYS: dict[str, dict[str, Any]] = {
    "free": {},
    "constrained": {},
    "left to right": {"decode": "causal", "temperature": 0},
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
    findings: dict[str, Any] = {"messages": args.messages}
    for split in args.splits:
        messages = [make_message(split, number, seed=1) for number in range(args.messages)]
        for way in args.ways:
            found = findings[f"{split}, {way}"] = measure(lm, messages, way)
            print(split, way, found, flush=True)
    record.write("forms", findings, args.suffix)


def measure(lm: LanguageModel, messages: list[Message], way: str) -> dict[str, Any]:
    exact, right, fields, forwards, wrong = 0, 0, 0, 0, []
    began = time.perf_counter()
    for message in messages:
        found, used = extract(lm, message, way)
        forwards += used
        expected = message.expected
        exact += found == expected
        if found != expected and len(wrong) < 5:
            wrong.append({"message": message.text, "record": expected, "found": found})
        fields += len(expected)
        right += sum(isinstance(found, dict) and k in found and found[k] == v for k, v in expected.items())
    return {
        "exact": exact / len(messages),
        "interval": asdict(wilson(exact, len(messages))),
        "fields": right / fields,
        "forwards": forwards / len(messages),
        "seconds": (time.perf_counter() - began) / len(messages),
        "wrong": wrong,
    }


def extract(lm: LanguageModel, message: Message, way: str) -> tuple[Any, int]:
    """The record, or None if the text is none, and the forwards it took."""
    options: dict[str, Any] = {"seed": 0, **WAYS[way]}
    if way == "constrained":
        options["json_schema"] = record_schema(message.type) if message.is_typed else any_schema()
    answer = lm.chat(message.prompt, **options)
    try:
        return json.loads(answer.text), answer.forwards
    except ValueError:
        return None, answer.forwards


if __name__ == "__main__":
    main()
