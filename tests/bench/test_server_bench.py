"""Load over a real socket: every request is counted once, times are from the scheduled arrival, and arrivals
wait for nobody."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from types import MappingProxyType
from typing import Any

import pytest

from bench.scripted_server import PIECES, USAGE, ScriptedServer, listening
from dgemma.bench import server_client
from dgemma.bench.server_bench import LoadPlan, page, percentile, percentiles, run_server_bench, summary
from dgemma.bench.server_client import Exchange, Fate, base_url, exchange, open_client, plain
from dgemma.errors import InputError
from dgemma.server.app import create_app
from dgemma.server.http.settings import Settings
from server.fake_engine import FakeText
from server.served import eventually, on_a_port
from server.toy_server import toy_engine

FATES = ("sent", "ok", "refused", "failed", "lost")
FAST = 200.0  # arrivals per second


def bench(server: ScriptedServer, *prompts: str, **options: Any) -> dict[str, Any]:
    with listening(server) as url:
        plan = LoadPlan(
            **{"url": url, "rates": (FAST,), "prompts": prompts, "requests": len(prompts), **options}
        )
        found = run_server_bench(plan)
        eventually(lambda: server.open == 0)  # all connections are closed
    json.dumps(found)
    return found


def one(server: ScriptedServer, *prompts: str, **options: Any) -> dict[str, Any]:
    (load,) = bench(server, *prompts, **options)["loads"]
    return dict(load)


def counts(load: dict[str, Any]) -> tuple[int, ...]:
    return tuple(load[name] for name in FATES)


# Counts


def test_every_request_is_counted_once_by_what_became_of_it() -> None:
    words = {
        "ok": 4, "separator": 1, "refuse": 3, "full": 1, "error": 2, "reject": 1, "error in stream": 2,
        "nothing": 1, "break": 2, "stop": 1, "vanish": 1, "garbage": 1, "hang": 1,
    }  # fmt: skip
    prompts = [word for word, count in words.items() for _ in range(count)]
    load = one(ScriptedServer(), *prompts, timeout_s=3.0)
    assert counts(load) == (21, 5, 4, 6, 6)
    assert load["in_time"] == 5
    # The most frequent reasons first, and no more than five.
    reasons = [(entry["fate"], entry["reason"], entry["count"]) for entry in load["reasons"]]
    assert set(reasons[:2]) == {("refused", "HTTP 429", 3), ("lost", "broken off", 3)}
    assert [count for _, _, count in reasons[2:]] == [2, 2, 1]
    # One that hangs takes nobody's goodput.
    assert load["duration_s"] >= 3.0 > load["busy_s"]


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("stop", "no [DONE]"),
        ("break", "broken off"),
        ("vanish", "broken off"),
        ("garbage", "not parsable"),
        ("hang", "timeout"),
        ("nothing", "no choices"),
        ("error in stream", "an error in the answer"),
    ],
)
def test_what_is_not_whole_has_a_reason(word: str, reason: str) -> None:
    load = one(ScriptedServer(), word, timeout_s=0.5 if word == "hang" else 60.0)
    assert [entry["reason"] for entry in load["reasons"]] == [reason]


def test_errors_are_named_in_words_that_cannot_move_the_cursor() -> None:
    load = one(ScriptedServer(), "ok", "error")
    assert load["reasons"] == [
        {"fate": "failed", "reason": "HTTP 500", "count": 1, "example": "status 500 [31m for this"}
    ]
    assert plain("a\nb\tc " + 500 * "x") == "a b c " + 151 * "x" + "..."


@pytest.mark.parametrize("word", ["garbage", "nothing", "error", "refuse", "vanish"])
def test_an_answer_in_one_piece_has_the_same_fates(word: str) -> None:
    fates = {"garbage": "lost", "nothing": "failed", "error": "failed", "refuse": "refused", "vanish": "lost"}
    load = one(ScriptedServer(), "ok", word, stream=False)
    assert load["ok"] == load[fates[word]] == 1


def test_requests_are_in_turn_the_prompts_and_the_first_is_not_counted() -> None:
    server = ScriptedServer()
    load = one(server, "ok", "slow", "separator", requests=7)
    assert load["sent"] == 7
    words = [body["messages"][0]["content"] for body in server.bodies]
    assert words[0] == "ok"
    assert Counter(words[1:]) == {"ok": 3, "slow": 2, "separator": 2}


# What is sent


def test_a_chat_asks_for_usage_and_takes_further_fields() -> None:
    server = ScriptedServer()
    extra = MappingProxyType({"seed": 5, "max_tokens": None, "max_completion_tokens": 9})
    found = bench(server, "ok", extra=extra, api_key="a-key")
    assert server.paths == ["/v1/chat/completions"] * 2
    assert server.bodies[0] == {
        "model": "scripted",
        "messages": [{"role": "user", "content": "ok"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 5,
        "max_completion_tokens": 9,
    }
    assert server.headers[1]["authorization"] == "Bearer a-key"
    assert server.headers[1]["accept-encoding"] == "identity"
    assert found["model"] == "scripted"
    assert "a-key" not in repr(found)
    assert "a-key" not in repr(LoadPlan(url="x", api_key="a-key"))


@pytest.mark.parametrize("stream", [True, False])
def test_completions_are_asked_with_a_prompt(stream: bool) -> None:
    server = ScriptedServer()
    load = one(server, "ok", chat=False, stream=stream, model="mine", max_tokens=3)
    assert server.paths == ["/v1/completions"] * 2
    body = {"model": "mine", "prompt": "ok", "max_tokens": 3, "stream": stream}
    assert server.bodies[1] == {**body, **({"stream_options": {"include_usage": True}} if stream else {})}
    assert (load["ok"], load["output_tokens"], load["tokens_from"]) == (1, 7, "usage")
    assert load["first_text_s"] is not None


# Tokens


@pytest.mark.parametrize(
    ("stream", "has_usage", "expected"),
    [
        (True, True, (2 * USAGE["completion_tokens"], "usage")),
        (True, False, (2 * len(PIECES), "deltas")),
        (False, True, (2 * USAGE["completion_tokens"], "usage")),
        (False, False, (None, None)),
    ],
)
def test_tokens_are_those_of_the_usage_or_else_the_deltas_with_text(
    stream: bool, has_usage: bool, expected: tuple[int | None, str | None]
) -> None:
    load = one(ScriptedServer(has_usage=has_usage), "ok", "ok", "refuse", stream=stream)
    assert (load["output_tokens"], load["tokens_from"]) == expected
    if expected[0] is None:
        assert load["output_tokens_per_s"] is None
    else:
        assert load["output_tokens_per_s"] == pytest.approx(expected[0] / load["busy_s"])


# Times over the socket


def test_the_first_text_comes_before_the_end() -> None:
    load = one(ScriptedServer(delay_s=0.2), "slow", "slow")
    assert 0.2 <= load["first_text_s"]["p50"] < load["end_to_end_s"]["p50"]
    assert load["end_to_end_s"]["p50"] >= 0.6
    whole = one(ScriptedServer(), "ok", stream=False)
    assert whole["first_text_s"] == whole["end_to_end_s"]


def test_goodput_counts_only_answers_within_the_targets() -> None:
    server = ScriptedServer(delay_s=2.0)  # six seconds for an answer
    load = one(server, "ok", "slow", "ok", "refuse", "slow", "break", latency_target_s=5.5)
    assert counts(load) == (6, 4, 1, 0, 1)
    assert load["in_time"] == 2
    assert load["goodput_per_s"] == pytest.approx(2 / load["busy_s"])


def test_a_slow_server_does_not_slow_the_arrivals() -> None:
    server = ScriptedServer(delay_s=0.5)
    load = one(server, "slow", stream=False, rates=(20.0,), requests=20)
    rng = random.Random(0)
    last = sum(rng.expovariate(20.0) for _ in range(20))
    assert load["ok"] == 20
    assert last + 0.4 < load["duration_s"] < 9.0  # ten seconds, if they came one after another
    assert load["arrivals_per_s"] == pytest.approx(20 / last, rel=0.02)
    assert server.most_open > 3


def test_clients_in_a_closed_loop_have_one_request_each_under_way() -> None:
    server = ScriptedServer(delay_s=0.1)
    loads = bench(server, "slow", rates=(), concurrency=(1, 3, 99), stream=False, requests=6)["loads"]
    assert [load["clients"] for load in loads] == [1, 3, 99]
    assert [load["ok"] for load in loads] == [6, 6, 6]
    assert loads[0]["duration_s"] >= 0.6
    assert loads[1]["duration_s"] >= 0.2
    assert server.most_open >= 3
    assert all(load["client_late_p99_s"] is load["arrivals_per_s"] is None for load in loads)


def test_a_stream_that_lingers_after_its_end_is_left() -> None:
    load = one(ScriptedServer(), "linger", "linger")
    assert load["ok"] == 2
    assert load["end_to_end_s"]["p99"] + 1.0 <= load["duration_s"] < 60.0


# Times by arithmetic


def made(
    at: float, end: float, *, fate: Fate = "ok", first: float | None = None, sent: float | None = None
) -> Exchange:
    return Exchange(
        scheduled_at=at,
        sent_at=at if sent is None else sent,
        first_text_at=first,
        ended_at=end,
        fate=fate,
        usage_tokens=10 if fate == "ok" else None,
    )


def test_times_are_from_the_scheduled_arrival_and_rates_until_the_last_whole_answer() -> None:
    plan = LoadPlan(url="x", latency_target_s=4.0, first_text_target_s=2.0)
    exchanges = [
        made(101, 105, first=103),  # at both targets
        made(102, 104, first=104.5),  # its text too late
        made(102, 107, sent=106, first=106.5),  # soon answered, but sent late
        made(103, 104),  # no text at all
        made(105, 400, fate="lost"),
        made(110, 110, fate="refused"),
    ]
    load = summary(plan, 100.0, exchanges, 400.0)
    assert counts(load) == (6, 4, 1, 0, 1)
    assert load["in_time"] == 1
    assert (load["busy_s"], load["duration_s"]) == (10.0, 300.0)
    assert (load["goodput_per_s"], load["output_tokens_per_s"]) == (0.1, 4.0)
    assert load["arrivals_per_s"] == 0.6
    assert load["end_to_end_s"] == {"p50": 2.0, "p90": 5.0, "p99": 5.0}
    assert load["first_text_s"] == {"p50": 2.5, "p90": 4.5, "p99": 4.5}
    assert load["client_late_p99_s"] == 4.0
    longer = summary(plan, 100.0, [made(101, 125)], 126.0)
    assert longer["busy_s"] == 25.0
    nothing = summary(plan, 100.0, [made(101, 101, fate="failed")], 101.0)
    assert (nothing["first_text_s"], nothing["end_to_end_s"], nothing["tokens_from"]) == (None, None, None)
    assert summary(plan, 101.0, [made(101, 101)], 101.0)["arrivals_per_s"] == 0.0


def test_tokens_of_two_sources_are_said_to_be_so() -> None:
    mixed = [made(1, 2), made(1, 2)]
    mixed[1].usage_tokens, mixed[1].num_texts = None, 3
    load = summary(LoadPlan(url="x"), 0.0, mixed, 2.0)
    assert (load["output_tokens"], load["tokens_from"]) == (13, "both")


def test_percentiles_are_by_nearest_rank() -> None:
    hundred = random.Random(0).sample(range(1, 101), 100)
    assert percentiles(hundred) == {"p50": 50, "p90": 90, "p99": 99}
    assert percentiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p90": 3.0, "p99": 3.0}
    assert percentiles([]) is None
    assert percentile([1.0, 2.0], 50) == 1.0
    assert percentile([1.0, 2.0], 0) == 1.0


def test_arrivals_are_poisson_and_the_same_on_the_scale_of_each_rate() -> None:
    plan = LoadPlan(url="x", requests=4000, seed=3)
    slow, fast = plan.arrivals(2.0), plan.arrivals(8.0)
    assert slow == pytest.approx([4 * at for at in fast])
    assert slow != LoadPlan(url="x", requests=4000, seed=4).arrivals(2.0)
    gaps = [b - a for a, b in zip([0.0, *slow], slow, strict=False)]
    assert sum(gaps) / 4000 == pytest.approx(0.5, rel=0.05)
    assert sum(gap > 0.5 for gap in gaps) / 4000 == pytest.approx(0.368, abs=0.03)


# Errors


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://host:8000", "http://host:8000/v1"),
        ("http://host:8000/", "http://host:8000/v1"),
        ("https://host/v1", "https://host/v1"),
        (" http://[::1]:80/v1/ ", "http://[::1]:80/v1"),
        ("http://host/behind/here/", "http://host/behind/here/v1"),
    ],
)
def test_a_url_may_have_v1_or_not(url: str, base: str) -> None:
    assert base_url(url) == base


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "ftp://host", "", "http://", "http://host:port", "http://me:secret@host", "http://h/?a=1",
     "file:///etc/passwd", "http://[::1", "http://h/#x"],
)  # fmt: skip
def test_another_url_is_an_input_error_with_a_remedy(url: str) -> None:
    with pytest.raises(
        InputError, match=r"; give the address of an OpenAI-compatible server.*8000\.$"
    ) as caught:
        run_server_bench(LoadPlan(url=url))
    assert caught.value.field == "url"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", [None, "mine"])
def test_an_unreachable_server_is_an_input_error(model: str | None) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            InputError, match=r"does not answer \(Connection refused\); start the server, or give"
        ):
            run_server_bench(LoadPlan(url=url, model=model))


@pytest.mark.parametrize("models", [{"data": []}, [], {"data": [{"id": 3}]}, {"error": "x"}])
def test_a_server_that_lists_no_model_needs_a_name(models: Any) -> None:
    server = ScriptedServer()
    server.models = models
    with pytest.raises(InputError, match="lists no model at /v1/models; give the model's name"):
        one(server, "ok")
    assert one(server, "ok", model="mine")["ok"] == 1


def test_a_wrong_address_of_a_server_is_an_input_error() -> None:
    with on_a_port(create_app(Settings(), toy_engine(600), FakeText())) as url:
        with pytest.raises(
            InputError, match="answers 404 to GET /v1/models; give the model's name, or give the"
        ):
            run_server_bench(LoadPlan(url=f"{url}/elsewhere"))
        with pytest.raises(
            InputError, match=r"/v1/chat/completions answers 404 \(.+\); check the URL, the model"
        ):
            run_server_bench(LoadPlan(url=url, model="unknown"))
    with (
        on_a_port(create_app(Settings(api_keys=("right",)), toy_engine(600), FakeText())) as url,
        pytest.raises(InputError, match="answers 401 to GET /v1/models; give an API key that it takes"),
    ):
        run_server_bench(LoadPlan(url=url, api_key="wrong"))


@pytest.mark.parametrize(("word", "remedy"), [("reject", "check the URL"), ("key", "give an API key")])
def test_a_first_request_that_is_wrong_in_itself_is_an_input_error(word: str, remedy: str) -> None:
    with pytest.raises(InputError, match=f"; {remedy}"):
        one(ScriptedServer(), word)


def test_a_first_request_that_fails_otherwise_is_logged() -> None:
    said: list[str] = []
    with listening(ScriptedServer()) as url:
        plan = LoadPlan(url=url, prompts=("refuse",), rates=(FAST,), concurrency=(2,), requests=3)
        found = run_server_bench(plan, said.append)
    assert said == [
        "warming up",
        "the first request was refused: HTTP 429 status 429 [31m for this",
        "200 requests/s, 3 requests",
        "2 clients, 3 requests",
    ]
    assert [load["refused"] for load in found["loads"]] == [3, 3]


def test_a_server_that_dies_in_between_is_counted_not_raised() -> None:
    """And the limits of this machine are told from the server's."""

    async def asked(base: str) -> Exchange:
        async with open_client(base, None) as client:
            return await exchange(client, "/completions", {}, scheduled_at=0.0, timeout_s=60.0)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        found = asyncio.run(asked(f"http://127.0.0.1:{taken.getsockname()[1]}/v1"))
    assert (found.fate, found.reason, found.detail) == ("failed", "no connection", "Connection refused")


def test_the_cause_of_an_error_is_what_the_system_said() -> None:
    inner = OSError(24, "Too many open files")
    outer = RuntimeError("All connection attempts failed")
    outer.__cause__ = ExceptionGroup("two addresses", [inner, OSError(111, "Connection refused")])
    assert server_client._cause(outer) == ("Too many open files", 24)
    assert server_client._cause(ValueError()) == ("ValueError", None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"requests": 0}, "requests is 0; it must be at least 1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"rates": (1.0, 0.0)}, "rates has 0; it must be a number above 0"),
        ({"rates": (float("inf"),)}, "rates has inf"),
        ({"timeout_s": float("nan")}, "timeout_s has nan"),
        ({"latency_target_s": -1.0}, "latency_target_s has -1"),
        ({"first_text_target_s": 0.0}, "first_text_target_s has 0"),
        ({"concurrency": (3, 0)}, "concurrency has 0; it must be at least 1"),
        ({"rates": ()}, "rates is empty, and so is concurrency"),
        ({"prompts": ()}, "prompts is empty"),
        ({"extra": {"a": object()}}, "extra is no JSON"),
        ({"extra": {"a": float("nan")}}, "extra is no JSON"),
        ({"api_key": "two\nlines"}, "api_key must be printable ASCII"),
        ({"api_key": ""}, "api_key must be printable ASCII"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_server_bench(LoadPlan(**{"url": "http://127.0.0.1:9", **options}))


def test_an_endless_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "_MOST_BYTES", 60)
    for stream in (True, False):
        load = one(ScriptedServer(), "ok", stream=stream)
        assert (load["lost"], load["reasons"][0]["reason"]) == (1, "not parsable")


# The page


def test_the_page_is_a_table_that_ends_with_a_sentence() -> None:
    found = bench(ScriptedServer(), "ok", "refuse", "ok", rates=(FAST, 2 * FAST), concurrency=(2,))
    lines = page(found).splitlines()
    assert lines[0].startswith(f"{found['url']}, model scripted: chat, streamed, at most 64 tokens")
    assert lines[1].split()[:6] == ["load", "arrived/s", "sent", "ok", "refused", "failed"]
    name, _, *figures = lines[2].split()
    assert (name, *figures[:5]) == ("200/s", "3", "2", "1", "0", "0")
    assert {len(lines[at]) for at in (1, 2, 4, 6)} == {len(lines[1])}
    assert lines[3] == "  1 refused: HTTP 429 (status 429 [31m for this)"
    assert lines[4].startswith("400/s ")
    assert lines[6].startswith("2 clients ")
    assert lines[-1].startswith("The most goodput was ")
    assert lines[-1].endswith(": 2 of 3 were answered whole within 10 s.")


def test_the_page_says_what_makes_its_figures_doubtful() -> None:
    found = bench(ScriptedServer(has_usage=False), "ok", first_text_target_s=2.0)
    found["loads"][0]["client_late_p99_s"] = 0.2
    lines = page(found).splitlines()
    assert "deltas with text count as tokens" in lines[-3]
    assert lines[-2] == "The client itself was late at 200/s: this machine is too busy for that."
    assert lines[-1].endswith("within 10 s and with their first text within 2 s.")
    found["loads"][0].update(in_time=0, goodput_per_s=0.0)
    assert page(found).endswith(
        "No request was answered whole within 10 s and with their first text within 2 s."
    )


# Our own server


@pytest.mark.parametrize("chat", [True, False])
def test_our_server_answers_every_request_whole(chat: bool) -> None:
    began = time.perf_counter()
    with on_a_port(create_app(Settings(), toy_engine(600), FakeText())) as url:
        plan = LoadPlan(
            url=f"{url}/v1/", rates=(20.0,), concurrency=(2,), requests=6, max_tokens=8, prompts=("Why?",),
            chat=chat, extra={"seed": 3, "max_denoising_steps": 2, "ignore_end": True},
        )  # fmt: skip
        found = run_server_bench(plan)
    assert found["model"] == "dgemma"
    for load in found["loads"]:
        assert counts(load) == (6, 6, 0, 0, 0), load["reasons"]
        assert (load["output_tokens"], load["tokens_from"]) == (48, "usage")
        assert 0 < load["first_text_s"]["p50"] <= load["end_to_end_s"]["p50"] < time.perf_counter() - began
