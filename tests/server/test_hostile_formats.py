"""Forms that are made to take long: refused in bounded time, and nobody else waits for them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from dgemma.errors import InputError
from dgemma.server import compile_pool
from dgemma.server.fair_turns import MAX_RUNNING
from dgemma.structured_output import compiler
from dgemma.structured_output.budget import TimeBudget
from server.compile_in_process import CompileInProcess
from server.fake_engine import FakeEngine
from server.served import CHAT, COMPLETIONS, HELLO, ONCE, app_of, error_of, eventually, on_a_port

# Takes all of its time: the machine of each part is small, their product is not.
ENDLESS = "|".join(f".*{number}.*" for number in range(200))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    # By the clock only what hangs is refused: it is processor time that is bounded.
    with on_a_port(app_of(compile_timeout_s=240)) as address:
        yield address


def ask(address: str, body: dict[str, Any], path: str = CHAT) -> httpx2.Response:
    base = HELLO if path == CHAT else ONCE
    return httpx2.post(f"{address}{path}", json={**base, **body}, timeout=300)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def doubled(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
    return schema


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"regex": "(.{1000}){1000}"}, "regex"),
        ({"regex": "(a|b)*a(a|b){30}"}, "regex"),
        ({"regex": "(" * 5000 + "a" + ")" * 5000}, "regex"),
        ({"regex": "a{99999999}"}, "regex"),
        ({"regex": "[" + "a-z" * 100_000}, "regex"),
        ({"choice": [str(number) for number in range(10_001)]}, "choice"),
        ({"json_schema": nested(40)}, "json_schema"),
        ({"json_schema": doubled(13)}, "json_schema"),
        ({"json_schema": {"$ref": "#"}}, "json_schema"),
        ({"json_schema": {"$ref": "http://127.0.0.1:1/x"}}, "json_schema"),
        ({"json_schema": {"enum": list(range(200_000))}}, "json_schema"),
        ({"json_schema": json.dumps({"title": "x" * (4 << 20)})}, "json_schema"),
        ({"json_schema": "[" * 100_000}, "json_schema"),
        ({"json_schema": {"properties": {f"p{n}": {} for n in range(100_000)}}}, "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": nested(28) | {"type": 1}}}},
            "response_format",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_would_take_too_much_is_a_400_soon(address: str, asked: dict[str, Any], param: str) -> None:
    began = time.monotonic()
    response = ask(address, asked, COMPLETIONS)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param
    assert time.monotonic() - began < 120  # of a busy machine; the compiler has five of its own


@pytest.mark.parametrize("regex", ["(a|a)*", "(a*)*", "(x+x+)+y"])
def test_what_makes_other_matchers_slow_is_nothing_to_a_machine(address: str, regex: str) -> None:
    assert ask(address, {"regex": regex}).status_code == 200


def test_a_schema_beyond_the_body_limit_is_refused_as_it_is_read(address: str) -> None:
    response = ask(address, {"json_schema": {"title": "x" * (10 << 20)}})
    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")


def test_others_are_answered_while_hostile_forms_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are compiled at once, and one more that leaves."""
    monkeypatch.setattr(compile_pool, "CompileProcess", CompileInProcess)
    monkeypatch.setattr(compiler, "DEFAULT_SECONDS", 2.0)
    may_end = threading.Event()

    class Held(TimeBudget):
        """When it is spent, it waits until the others have been answered."""

        def check(self) -> None:
            try:
                super().check()
            except InputError:
                may_end.wait(300)
                raise

    monkeypatch.setattr(compiler, "TimeBudget", Held)
    made: list[str] = []  # the last letters of all patterns that were looked at
    parse = compiler.parse

    def noted(pattern: str) -> Any:
        made.append(pattern[-1])
        return parse(pattern)

    monkeypatch.setattr(compiler, "parse", noted)
    engine = FakeEngine()
    with on_a_port(app_of(engine)) as address, ThreadPoolExecutor(MAX_RUNNING) as threads:
        assert ask(address, {"choice": ["yes", "no"]}).status_code == 200
        hostile = [threads.submit(ask, address, {"regex": ENDLESS + str(n)}) for n in range(MAX_RUNNING)]
        eventually(lambda: len(made) == MAX_RUNNING)
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(f"{address}{CHAT}", json={**HELLO, "regex": ENDLESS + "x"}, timeout=0.2)
        for body in ({}, {"choice": ["yes", "no"]}, {"stream": True}):
            assert ask(address, body).status_code == 200
        assert not any(job.done() for job in hostile), "plain requests and known forms wait for none of them"
        may_end.set()
        assert [job.result().status_code for job in hostile] == [400] * MAX_RUNNING
        # Who asks once more is refused without being compiled once more.
        assert ask(address, {"regex": ENDLESS + "0"}).status_code == 400
        assert ask(address, {"regex": "[0-9]+"}).status_code == 200
    assert sorted({*made} - {"x"}) == ["+", *map(str, range(MAX_RUNNING))]
    assert len(made) <= MAX_RUNNING + 2, "each once"
    assert len(engine.requests) == 5
