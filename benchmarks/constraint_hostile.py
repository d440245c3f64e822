"""Constraints that would explode: how soon each is refused, with how much memory, at Gemma 4's vocabulary.

    python -m benchmarks.constraint_hostile tokenizer_gemma4.model

Each is compiled from the text that a client sends to a token DFA. Measured are CPU seconds and the rise
of peak memory above what is held before.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.constraint_cost import CPU, compiled, read_words
from dgemma.bench.memory import peak_growth_bytes
from dgemma.errors import InputError
from dgemma.structured_output.budget import DEFAULT_SECONDS
from dgemma.structured_output.response_format import schema_text
from dgemma.structured_output.token_dfa import TokenTrie

DOUBLING = {
    "$defs": {
        f"d{n}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{n + 1}"}] * 2, "minItems": 2}
        for n in range(40)
    }
    | {"d40": {"type": "integer"}},
    "$ref": "#/$defs/d0",
}


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


HOSTILE: dict[str, Any] = {
    "regex (.{1000}){1000}": r"(.{1000}){1000}",
    "regex ((a{100}){100}){100}": r"((a{100}){100}){100}",
    "regex .*a.{30} (exponential states)": r".*a.{30}",
    "regex (a|b)*a(a|b){25}": r"(a|b)*a(a|b){25}",
    "regex (x+x+)+y": r"(x+x+)+y",
    "regex (a?){3000}a{3000}": r"(a?){3000}a{3000}",
    "regex of 1,000 groups": "(" * 1000 + "a" + ")" * 1000,
    "regex of 2 MB": "(abc|def)?" * 200_000,
    "regex .{0,10000}": r".{0,10000}",
    "regex [a-z]{0,99} ten times": r"([a-z]{0,99}[0-9]{0,99}){10}",
    "schema of 10 MB": json.dumps({"enum": ["x" * 100] * 100_000}),
    "schema with a million values": json.dumps({"enum": list(range(1_000_000))}),
    "schema 10,000 deep": nested(10_000),
    "schema 140 deep": nested(140),
    "references that double 40 times": json.dumps(DOUBLING),
    "400 optional properties of any kind": json.dumps({"properties": {f"p{n}": {} for n in range(400)}}),
    "allOf of 300 anyOf": json.dumps(
        {"allOf": [{"anyOf": [{"minLength": n}, {"pattern": "a"}]} for n in range(300)]}
    ),
    "pattern and maxLength": json.dumps({"type": "string", "pattern": ".*a.{25}", "maxLength": 2000}),
    "array of 1,000 strings of 2,000": json.dumps(
        {"type": "array", "items": {"type": "string", "maxLength": 2000}, "maxItems": 1000}
    ),
}


def attempt(text: str, trie: TokenTrie, is_schema: bool) -> str:
    try:
        found = json.loads(schema_text(text)) if is_schema else text
        dfa = compiled(found, trie, seconds=DEFAULT_SECONDS).token_dfa
    except InputError as error:
        return f"refused: {str(error)[:160]}"
    return f"compiled: {dfa.num_states} states, {dfa.num_classes} classes"


def measure(name: str, trie: TokenTrie) -> dict[str, Any]:
    said: list[str] = []
    begin = time.process_time()
    is_schema = not name.startswith("regex")
    grown = peak_growth_bytes(lambda: said.append(attempt(HOSTILE[name], trie, is_schema)), CPU)
    assert grown is not None
    return {"cpu_s": round(time.process_time() - begin, 2), "peak_mb": round(grown / 1e6), "outcome": said[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokenizer", type=Path, help="sentencepiece model of Gemma 4")
    args = parser.parse_args()
    trie = read_words(args.tokenizer)
    rows = {}
    for name in HOSTILE:
        rows[name] = measure(name, trie)
        print(name, rows[name], flush=True)
    findings = {
        "most_cpu_s": max(row["cpu_s"] for row in rows.values()),
        "most_mb": max(row["peak_mb"] for row in rows.values()),
        "constraints": rows,
    }
    record.write("constraint_hostile", findings)


if __name__ == "__main__":
    main()
