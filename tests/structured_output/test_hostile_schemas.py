"""Large schemas, and schemas that grow when unfolded, are refused or compiled in bounded time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dgemma.structured_output.budget import TimeBudget
from dgemma.structured_output.dfa import build_dfa
from dgemma.structured_output.json_schema.grammar import schema_grammar
from dgemma.structured_output.json_schema.syntax import JsonSyntax, ToolCallSyntax

SOURCE = Path(__file__).parent.parent.parent / "src"
RUN = """
import json, re, sys, time
from dgemma.structured_output.budget import TimeBudget
from dgemma.structured_output.dfa import build_dfa
from dgemma.structured_output.json_schema.grammar import schema_grammar
from dgemma.structured_output.json_schema.syntax import JsonSyntax
from dgemma.errors import InputError

for schema in json.load(sys.stdin):
    before, budget = time.process_time(), TimeBudget(0.5)
    try:
        build_dfa(schema_grammar(schema, JsonSyntax(), budget=budget), budget)
    except InputError:
        pass
    print(time.process_time() - before)
# Not `ru_maxrss`, which a process inherits from the one that started it.
print(int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024)
"""


def doubled(count: int, keyword: str, **others: Any) -> dict[str, Any]:
    names: dict[str, Any] = {
        f"d{n}": {
            keyword: [{"$ref": f"#/$defs/d{n + 1}", "minimum": n}, {"$ref": f"#/$defs/d{n + 1}"}],
            **others,
        }
        for n in range(count)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**names, f"d{count}": {"type": "null"}}}


HOSTILE: dict[str, Any] = {
    "a reference twice": doubled(40, "prefixItems", type="array", minItems=2),
    "alternatives twice": doubled(40, "anyOf"),
    "both twice": doubled(40, "allOf"),
    "parts that exclude each other": {"oneOf": [{"minimum": n} for n in range(3000)]},
    "many at once": {"allOf": [{"minimum": n} for n in range(15_000)]},
    "a hundred ways back": {
        "$ref": "#/$defs/n",
        "$defs": {"n": {"properties": {f"p{n}": {"$ref": "#/$defs/n"} for n in range(100)}}},
    },
    "patterns of keys": {"patternProperties": {f"a{n}.*b{n}": {"type": "integer"} for n in range(20)}},
    "a pattern and a length": {"type": "string", "pattern": "(a|b)*a(a|b){8}", "maxLength": 2000},
    "long strings": {"properties": {f"p{n}": {"type": "string", "maxLength": 2000} for n in range(200)}},
    "a long list": {"enum": [f"value {n * 7919}" for n in range(9000)]},
    "not a long list": {"type": "string", "not": {"enum": [f"value {n * 7919}" for n in range(9000)]}},
    "counted members": {"properties": {f"p{n}": {} for n in range(300)}, "maxProperties": 150},
    "many counted members": {"properties": {f"p{n}": {} for n in range(2000)}, "maxProperties": 1000},
    "many counted items": {"type": "array", "maxItems": 1000, "contains": {}, "maxContains": 900},
    "distinct items": {"type": "array", "items": {"enum": list(range(1000))}, "uniqueItems": True},
}


def test_time_and_memory_are_bounded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(list(HOSTILE.values())),
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
    )
    *seconds, megabytes = map(float, done.stdout.split())
    for name, taken in zip(HOSTILE, seconds, strict=True):
        assert taken < 2, (name, taken)  # half a second, and the work between two checks of the budget
    assert megabytes < 500


@pytest.mark.parametrize("syntax", [JsonSyntax(), ToolCallSyntax(7)], ids=["json", "call"])
def test_two_hundred_properties_are_taken(syntax: JsonSyntax | ToolCallSyntax) -> None:
    properties = {f"property_{n}": {"type": "string" if n % 2 else "integer"} for n in range(200)}
    dfa = build_dfa(schema_grammar({"type": "object", "properties": properties}, syntax), TimeBudget(30))
    assert dfa.num_states < 12_000
    if isinstance(syntax, JsonSyntax):
        assert dfa.matches('{"property_0": 1, "property_7": "x", "property_198": 3}')
        assert dfa.matches("{}")
        assert not dfa.matches('{"property_7": "x", "property_0": 1}')


def test_a_string_of_two_thousand_characters_is_taken() -> None:
    dfa = build_dfa(schema_grammar({"type": "string", "maxLength": 2000}, JsonSyntax()), TimeBudget(30))
    assert dfa.matches('"' + "é" * 1999 + '\\n"')
    assert not dfa.matches('"' + "é" * 2001 + '"')
