"""Requests of many kinds, what each is answered alone, and what became of those that came in a crowd."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.load_client import CHAT, COMPLETIONS, Reply

MODEL = "load"
_TEXT = (
    "the a of to in is and for package module value file kernel buffer iterator thread lock memory page "
    "function returns object table index option default system driver device interrupt queue request error "
    "when each must not may written read before after closed open name type signal"
)
_QUESTIONS = (
    "What is os.path.join?",
    "How is a thread started?",
    "What does select return?",
    "What is a page?",
)
_STOPS = (["\n\n"], [" the"], ["."], [" of", " is"])
_DOCUMENTS = 6
_SCHEMAS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names.split()},
        "required": names.split(),
    }
    for names in ("year", "year month day", "width height", "first second third fourth")
)
_PATTERNS = ("[a-z ]{5,40}", "[0-9]{4}-[0-9]{2}", "(open|read|close)\\([a-z]+\\)")
_SEEDS_APART = 16  # more than a request has answers: no two requests share a seed


@dataclass(frozen=True)
class Ask:
    """One request of the pool. Its deadline is kept apart: alone, it is asked without."""

    number: int
    path: str
    fields: dict[str, Any]
    deadline_s: float | None = None

    @property
    def body(self) -> dict[str, Any]:
        deadline = {} if self.deadline_s is None else {"deadline_s": self.deadline_s}
        return {"model": MODEL, **self.fields, **deadline}

    @property
    def body_alone(self) -> dict[str, Any]:
        return {"model": MODEL, **self.fields}

    @property
    def is_streamed(self) -> bool:
        return bool(self.fields.get("stream"))


def make_pool(seed: int, count: int, *, most_steps: int | None = None) -> list[Ask]:
    """Requests of all kinds. most_steps: per canvas, where a test has no time for more."""
    rng = random.Random(seed)
    documents = [_prose(rng, rng.randint(150, 500)) for _ in range(_DOCUMENTS)]
    return [_one(rng, number, documents, most_steps) for number in range(count)]


def make_mixed_pool(seed: int, count: int, *, most_steps: int) -> list[Ask]:
    """The same, and half as many that fill, edit, decide or are constrained."""
    rng = random.Random(seed + 1)
    tasks = [_task(rng, number, most_steps) for number in range(count, count + count // 2)]
    return make_pool(seed, count, most_steps=most_steps) + tasks


def _task(rng: random.Random, number: int, most_steps: int) -> Ask:
    text, seed = _prose(rng, rng.randint(5, 25)), 1_000_000 + _SEEDS_APART * number
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": rng.choice(_QUESTIONS) + f" {number}"}],
        "seed": seed,
        "max_tokens": 32,
        "max_denoising_steps": most_steps,
        "stream": rng.random() < 0.5,
    }
    schema = {"name": "answer", "schema": rng.choice(_SCHEMAS)}
    edit = (
        f"<|current_file_content|>\n<|code_to_edit|>\n{text}\n<|/code_to_edit|>\n<|/current_file_content|>\n"
    )
    asks: tuple[tuple[str, dict[str, Any]], ...] = (
        (CHAT, {**chat, "response_format": {"type": "json_schema", "json_schema": schema}}),
        (CHAT, {**chat, "regex": rng.choice(_PATTERNS)}),
        (CHAT, {**chat, "choice": ["yes", "no", f"maybe {number % 4}"]}),
        (COMPLETIONS, {"prompt": text, "suffix": " and so on.", "seed": seed, "max_tokens": 6}),
        ("/v1/edit/completions", {"messages": [{"role": "user", "content": edit}], "seed": seed}),
        ("/v1/decisions", {"input": text, "questions": [
            {"type": "predicate", "name": "good", "instructions": "Is it good?"},
        ]}),
    )  # fmt: skip
    return Ask(number, *rng.choice(asks))


def _prose(rng: random.Random, length: int) -> str:
    words = _TEXT.split()
    return " ".join(rng.choice(words) + rng.choice(("", "", "", "", ",", ".")) for _ in range(length))


def _one(rng: random.Random, number: int, documents: Sequence[str], most_steps: int | None) -> Ask:
    start = rng.choice(documents) + "\n" if rng.random() < 0.35 else ""
    fields: dict[str, Any] = {
        "seed": 1_000_000 + _SEEDS_APART * number,
        "max_tokens": rng.choice((16, 32, 64, 96, 128, 192)),
        "temperature": rng.choice((0, 0.7, 1)),
    }
    steps = rng.choice((None, 24, 12))
    if most_steps is not None:
        steps = rng.randint(2, most_steps)
    if steps is not None:
        fields["max_denoising_steps"] = steps
    if rng.random() < 0.25:
        fields["stop"] = rng.choice(_STOPS)
    if rng.random() < 0.1:
        fields["n"] = 2
    if rng.random() < 0.6:
        fields["stream"] = True
        if rng.random() < 0.3:
            fields["diffusing"] = True
        if rng.random() < 0.5:
            fields["stream_options"] = {"include_usage": True}
    deadline_s = round(rng.uniform(0.2, 4.0), 2) if rng.random() < 0.1 else None
    if rng.random() < 0.4:
        question = start + rng.choice(_QUESTIONS)
        return Ask(number, CHAT, {"messages": [{"role": "user", "content": question}], **fields}, deadline_s)
    prompt = start + _prose(rng, rng.randint(3, 40))
    return Ask(number, COMPLETIONS, {"prompt": prompt, **fields}, deadline_s)


@dataclass(frozen=True)
class Choice:
    """One answer, whole or joined from its stream: all that must not depend on company."""

    text: str
    thought: str
    finish: str
    details: str  # seed, steps, stop string, ...

    @property
    def is_late(self) -> bool:
        return bool(json.loads(self.details).get("finish_reason") == "deadline")


class BrokenReplyError(Exception):
    """What was sent as a whole answer is none."""


def choices_of(reply: Reply) -> tuple[Choice, ...]:
    """The answers of a reply with status 200."""
    try:
        parts = reply.events() if reply.is_stream else [json.loads(reply.body)]
        if not reply.is_stream and "answers" in parts[0]:  # decisions
            return (Choice(text=json.dumps(parts[0]["answers"]), thought="", finish="", details="{}"),)
        found: dict[int, list[dict[str, Any]]] = {}
        for part in parts:
            for choice in part["choices"]:
                found.setdefault(choice["index"], []).append(choice)
        if sorted(found) != list(range(len(found))) or not found:
            raise BrokenReplyError(f"choices {sorted(found)}")
        return tuple(_joined(found[index]) for index in range(len(found)))
    except (KeyError, ValueError, TypeError) as error:
        raise BrokenReplyError(f"{type(error).__name__}: {error}") from None


def _joined(parts: Sequence[Mapping[str, Any]]) -> Choice:
    said = [part.get("delta") or part.get("message") or part for part in parts]
    ends = [part for part in parts if part.get("finish_reason") is not None]
    if len(ends) != 1 or ends[0] is not parts[-1]:
        raise BrokenReplyError(f"{len(ends)} ends in {len(parts)} parts")
    return Choice(
        text="".join(one.get("content") or one.get("text") or "" for one in said),
        thought="".join(one.get("reasoning_content") or "" for one in said),
        finish=ends[0]["finish_reason"],
        details=json.dumps(ends[0]["dgemma"], sort_keys=True),
    )


@dataclass
class Tally:
    """What became of requests. All that is wrong is kept, with what it was about."""

    alone: Mapping[int, tuple[Choice, ...]]  # by the number of the request
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)

    def judge(self, ask: Ask, reply: Reply, request_id: str) -> str:
        """-> refused, left, late or same; lost, broken, crossed, different or mislabelled are wrong."""
        kind, why = self._kind(ask, reply, request_id)
        self.counts[kind] += 1
        if why:
            status, size = reply.status, len(reply.body)
            self.wrong.append(
                {"kind": kind, "why": why, "ask": ask.body, "status": status, "bytes": size}
                | {"seconds": round(reply.seconds, 3)}
            )
        return kind

    @property
    def num_wrong(self) -> int:
        return len(self.wrong)

    def summary(self) -> dict[str, Any]:
        return {"counts": dict(sorted(self.counts.items())), "wrong": self.num_wrong, "first": self.wrong[:3]}

    def _kind(self, ask: Ask, reply: Reply, request_id: str) -> tuple[str, str]:
        if reply.has_left:
            return "left", ""
        if reply.failure is not None or not reply.is_complete:
            return "lost", reply.failure or "it broke off"
        if reply.headers.get("x-request-id") != request_id:
            return "mislabelled", f"asked as {request_id}, answered as {reply.headers.get('x-request-id')}"
        if reply.status == 429:
            fine = reply.retry_after_s is not None and reply.error() is not None
            return ("refused", "") if fine else ("broken", "429 without Retry-After or error")
        if reply.status != 200 or not reply.is_done:
            return "broken", f"{reply.status}, {reply.error()}"
        try:
            choices = choices_of(reply)
        except BrokenReplyError as error:
            return "broken", str(error)
        return self._compared(ask, choices)

    def _compared(self, ask: Ask, choices: tuple[Choice, ...]) -> tuple[str, str]:
        if choices == self.alone[ask.number]:
            return "same", ""
        if ask.deadline_s is not None and len(choices) == ask.fields.get("n", 1):
            # Of several answers, those that were in time are as ever.
            pairs = zip(choices, self.alone[ask.number], strict=True)
            if all(one.is_late or one == other for one, other in pairs):
                return "late", ""
        owner = next((n for n, others in self.alone.items() if set(choices) & set(others)), ask.number)
        if owner != ask.number:
            return "crossed", f"the answer to {owner}"
        return "different", repr((choices, self.alone[ask.number]))[:2000]
