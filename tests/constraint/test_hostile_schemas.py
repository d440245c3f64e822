"""Schemas that are large, or grow when they are unfolded: refused in time and memory, or taken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dgemma.constraint.automaton import Clock, build
from dgemma.constraint.json_schema import schema_pattern
from dgemma.constraint.json_text import CallStyle, JsonStyle

SOURCE = Path(__file__).parent.parent.parent / "src"
RUN = """
import json, re, sys, time
from dgemma.constraint.automaton import Clock, build
from dgemma.constraint.json_schema import schema_pattern
from dgemma.constraint.json_text import JsonStyle
from dgemma.errors import InputError

for schema in json.load(sys.stdin):
    before, clock = time.process_time(), Clock(0.5)
    try:
        build(schema_pattern(schema, JsonStyle(), clock=clock), clock)
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
        assert taken < 2, (name, taken)  # half a second, and what lies between two looks at the clock
    assert megabytes < 500


@pytest.mark.parametrize("style", [JsonStyle(), CallStyle(7)], ids=["json", "call"])
def test_two_hundred_properties_are_taken(style: JsonStyle | CallStyle) -> None:
    properties = {f"property_{n}": {"type": "string" if n % 2 else "integer"} for n in range(200)}
    machine = build(schema_pattern({"type": "object", "properties": properties}, style), Clock(30))
    assert machine.num_states < 12_000
    if isinstance(style, JsonStyle):
        assert machine.matches('{"property_0": 1, "property_7": "x", "property_198": 3}')
        assert machine.matches("{}")
        assert not machine.matches('{"property_7": "x", "property_0": 1}')


def test_a_string_of_two_thousand_characters_is_taken() -> None:
    machine = build(schema_pattern({"type": "string", "maxLength": 2000}, JsonStyle()), Clock(30))
    assert machine.matches('"' + "é" * 1999 + '\\n"')
    assert not machine.matches('"' + "é" * 2001 + '"')
