"""Whatever an engine writes: the events of responses and messages are in order, and what a client puts
together from the deltas is the whole answer that would have come without a stream."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.events import Answer, Commit, Finish, FinishReason, ToolCall
from dgemma.server.messages.protocol import read_messages_request
from dgemma.server.messages.serving import MessagesWriter
from dgemma.server.plan import EngineUsage, ResponseWriter, TaskOutcome
from dgemma.server.responses.protocol import read_response_request
from dgemma.server.responses.serving import ResponsesWriter
from dgemma.server.serving import GenerationInfo, ResponseHead
from server.fake_engine import FakeText
from sizes import cases

texts = st.sampled_from(["", "a", "ö\n", "two words"])
calls = st.builds(
    ToolCall,
    name=st.sampled_from(["weather", "f"]),
    arguments=st.dictionaries(st.sampled_from(["a", "ä"]), st.none() | st.integers() | texts, max_size=2),
    error=st.sampled_from([None, None, "cut off"]),
)
commits = st.lists(st.tuples(texts, texts, st.lists(calls, max_size=2)), max_size=5)
ways = st.fixed_dictionaries(
    {
        "commits": commits,
        "late_calls": st.lists(calls, max_size=2),  # in the Finish alone
        "reason": st.sampled_from(list(FinishReason)),
        "has_tools": st.booleans(),
        "is_summary": st.booleans(),
        "is_omitted": st.booleans(),
    }
)
bounded = settings(max_examples=cases(1000, 100), deadline=None)


def events_of(way: dict[str, Any]) -> list[Commit | Finish]:
    written: list[Commit | Finish] = [
        Commit(row=0, canvas=number, tokens=(1,), steps=1, text=text, thought=thought, tool_calls=tuple(made))
        for number, (thought, text, made) in enumerate(way["commits"])
    ]
    answer = Answer(
        text="".join(text for _, text, _ in way["commits"]),
        tokens=(1,) * len(way["commits"]),
        finish_reason=way["reason"],
        seed=0,
        decode="diffuse",
        tool_calls=(*(call for *_, made in way["commits"] for call in made), *way["late_calls"]),
    )
    return [*written, Finish(row=0, answer=answer)]


def written_by(writer: ResponseWriter[list[Answer]], events: list[Any]) -> tuple[list[Any], Any]:
    """The chunks of a stream, and the whole answer; both as JSON."""
    chunks = list(writer.opening_chunks())
    for event in events:
        chunks += writer.event_chunks(0, event)
    outcome = TaskOutcome(result=[events[-1].answer], usage=EngineUsage(), seconds=0.0)
    return [json.loads(chunk.to_json()) for chunk in chunks], json.loads(writer.response([outcome]).to_json())


def info(way: dict[str, Any], id_: str) -> GenerationInfo:
    return GenerationInfo(
        head=ResponseHead(id=id_, created=1, model="dgemma", system_fingerprint="f"),
        num_choices=1,
        num_prompts=1,
        prompt_tokens=3,
        include_usage=False,
        logprobs=None,
        has_tools=way["has_tools"],
    )


def joined_items(chunks: list[Any]) -> list[Any]:
    """The output items that a client puts together from `added` and deltas; it refuses a wrong order."""
    items: dict[int, Any] = {}
    is_open: int | None = None
    for chunk in chunks:
        kind, at = chunk["type"].removeprefix("response."), chunk.get("output_index")
        if at is not None and kind != "output_item.added":
            assert at == is_open, "one item after another"
        match kind:
            case "output_item.added":
                assert (is_open, at) == (None, len(items))
                is_open = at
                items[at] = chunk["item"]
            case "content_part.added":
                assert chunk["content_index"] == len(items[at]["content"])
                items[at]["content"].append(chunk["part"])
            case "reasoning_summary_part.added":
                assert chunk["summary_index"] == len(items[at]["summary"])
                items[at]["summary"].append(chunk["part"])
            case "output_text.delta" | "reasoning_text.delta":
                items[at]["content"][chunk["content_index"]]["text"] += chunk["delta"]
            case "reasoning_summary_text.delta":
                items[at]["summary"][chunk["summary_index"]]["text"] += chunk["delta"]
            case "function_call_arguments.delta":
                items[at]["arguments"] += chunk["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert chunk["text"] == items[at]["content"][chunk["content_index"]]["text"]
            case "reasoning_summary_text.done":
                assert chunk["text"] == items[at]["summary"][chunk["summary_index"]]["text"]
            case "function_call_arguments.done":
                assert chunk["arguments"] == items[at]["arguments"]
            case "output_item.done":
                items[at]["status"] = chunk["item"]["status"]
                assert items[at] == chunk["item"]
                is_open = None
        if at is not None:
            assert chunk.get("item_id", items[at]["id"]) == items[at]["id"]
    assert is_open is None
    return list(items.values())


@bounded
@given(ways)
def test_a_response_put_together_from_its_stream_is_the_whole_response(way: dict[str, Any]) -> None:
    body = {"model": "dgemma", "input": "x", "reasoning": {"summary": "auto"} if way["is_summary"] else {}}
    writer = ResponsesWriter(info(way, "resp_1"), read_response_request(body), FakeText())
    chunks, whole = written_by(writer, events_of(way))
    assert [chunk["sequence_number"] for chunk in chunks] == list(range(len(chunks)))
    assert [chunk["type"] for chunk in chunks[:2]] == ["response.created", "response.in_progress"]
    status = "completed" if way["reason"] is FinishReason.STOP else "incomplete"
    assert (whole["status"], chunks[-1]["type"]) == (status, f"response.{status}")
    assert chunks[-1]["response"] == whole
    assert joined_items(chunks) == whole["output"]


def joined_blocks(chunks: list[Any]) -> list[Any]:
    """The blocks that a client puts together; it refuses a wrong order."""
    blocks: list[Any] = []
    inputs: dict[int, str] = {}
    is_open: int | None = None
    for chunk in chunks:
        match chunk["type"]:
            case "content_block_start":
                assert (is_open, chunk["index"]) == (None, len(blocks))
                is_open = chunk["index"]
                blocks.append(chunk["content_block"])
            case "content_block_delta":
                assert chunk["index"] == is_open
                block, delta = blocks[-1], chunk["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case "input_json_delta":
                        inputs[is_open] = inputs.get(is_open, "") + delta["partial_json"]
            case "content_block_stop":
                assert chunk["index"] == is_open
                is_open = None
    assert is_open is None
    for at, raw in inputs.items():
        blocks[at]["input"] = json.loads(raw)
    return blocks


@bounded
@given(ways)
def test_a_message_put_together_from_its_stream_is_the_whole_message(way: dict[str, Any]) -> None:
    thinking = {"type": "adaptive", "display": "omitted" if way["is_omitted"] else "summarized"}
    body = {"model": "dgemma", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    request = read_messages_request({**body, "thinking": thinking})
    writer = MessagesWriter(info(way, "msg_1"), request, FakeText())
    chunks, whole = written_by(writer, events_of(way))
    assert [chunk["type"] for chunk in chunks[:2]] == ["message_start", "ping"]
    assert [chunk["type"] for chunk in chunks[-2:]] == ["message_delta", "message_stop"]
    assert joined_blocks(chunks) == whole["content"]
    assert chunks[-2]["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    assert {name: chunks[-2][name] for name in ("usage", "dgemma")} == {
        name: whole[name] for name in ("usage", "dgemma")
    }
    assert chunks[0]["message"]["id"] == whole["id"]
