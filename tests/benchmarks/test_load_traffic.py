"""The load test's judge: whatever is wrong with an answer is seen."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.load_client import COMPLETIONS, Reply
from benchmarks.load_traffic import Ask, Tally, choices_of, make_pool


def one_choice(text: str, seed: int, finish: str = "stop") -> dict[str, Any]:
    details = {"seed": seed, "finish_reason": finish, "steps": [3]}
    return {"index": 0, "text": text, "finish_reason": "stop", "dgemma": details}


def whole(text: str, seed: int, **more: Any) -> Reply:
    body = json.dumps({"choices": [one_choice(text, seed, **more)]}).encode()
    return Reply(200, {"x-request-id": "id"}, body, is_complete=True)


def streamed(texts: list[str], seed: int, end: bytes = b"data: [DONE]\n\n") -> Reply:
    parts = [{"index": 0, "text": text, "finish_reason": None} for text in texts]
    events = [{"choices": [part]} for part in [*parts, one_choice("", seed)]]
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + end
    headers = {"x-request-id": "id", "content-type": "text/event-stream; charset=utf-8"}
    return Reply(200, headers, body, is_complete=True)


def refused(status: int, **headers: str) -> Reply:
    error = {"error": {"message": "full", "type": "t", "param": None, "code": "c"}}
    return Reply(status, {"x-request-id": "id", **headers}, json.dumps(error).encode(), is_complete=True)


ASKS = [Ask(0, COMPLETIONS, {"prompt": "a"}), Ask(1, COMPLETIONS, {"prompt": "b"}, deadline_s=1.0)]
ALONE = {0: choices_of(whole("one", 7)), 1: choices_of(whole("two", 23))}
BROKEN_OFF = Reply(200, {"x-request-id": "id"}, b'{"choi')
LEFT = Reply(200, {"x-request-id": "id"}, b'{"choi', has_left=True)
MISLABELLED = Reply(200, {"x-request-id": "another"}, whole("one", 7).body, is_complete=True)


@pytest.mark.parametrize(
    ("number", "reply", "kind"),
    [
        (0, whole("one", 7), "same"),
        (0, streamed(["o", "ne"], 7), "same"),
        (0, whole("on", 7), "different"),
        (0, streamed(["o"], 7), "different"),
        (0, whole("one", 8), "different"),
        (0, whole("two", 23), "crossed"),
        (0, whole("on", 7, finish="deadline"), "different"),
        (1, whole("t", 23, finish="deadline"), "late"),
        (1, whole("t", 23), "different"),
        (0, streamed(["one"], 7, end=b""), "broken"),
        (0, BROKEN_OFF, "lost"),
        (0, LEFT, "left"),
        (0, MISLABELLED, "mislabelled"),
        (0, refused(429, **{"retry-after": "1"}), "refused"),
        (0, refused(429), "broken"),
        (0, refused(500), "broken"),
    ],
)
def test_each_fate_of_a_request_is_told_apart(number: int, reply: Reply, kind: str) -> None:
    tally = Tally(ALONE)
    assert tally.judge(ASKS[number], reply, "id") == kind
    assert tally.num_wrong == (kind not in ("same", "late", "left", "refused"))


def test_a_pool_has_all_kinds_and_no_seed_twice() -> None:
    pool = make_pool(1, 200)
    fields = [one.fields for one in pool]
    seeds = [one["seed"] + i for one in fields for i in range(one.get("n", 1))]
    assert len(seeds) == len(set(seeds))
    for name in ("stop", "n", "stream", "diffusing", "max_denoising_steps", "messages", "prompt"):
        assert 10 <= sum(name in one for one in fields) < 200, name
    assert any(one.deadline_s for one in pool)
    assert pool == make_pool(1, 200)
