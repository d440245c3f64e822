"""ShareGPT's and Alpaca's records give the examples of our own forms, or say what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dgemma.errors import InputError
from dgemma.training.data.dataset_formats import SHAREGPT_ROLES
from dgemma.training.data.records import RecordReader
from dgemma.training.data.sources import open_files
from text.bundled import RICH, TEMPLATE, TOKENIZER

CHAT = RecordReader(tokenizer=TOKENIZER, template=TEMPLATE)
RAW = RecordReader(tokenizer=TOKENIZER, template=TEMPLATE, prompt_format="raw")
NO_TEMPLATE = RecordReader(tokenizer=TOKENIZER)
TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "x"}]


def test_a_sharegpt_record_is_its_messages() -> None:
    turns = [
        {"from": "system", "value": "Be brief."}, *TURNS, {"from": "human", "value": "b"},
        {"from": "gpt", "value": "y"},
    ]  # fmt: skip
    messages = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"},
        {"role": "assistant", "content": "x"}, {"role": "user", "content": "b"},
        {"role": "assistant", "content": "y"},
    ]  # fmt: skip
    found = CHAT.read({"id": "identity_0", "conversations": turns})
    assert found == CHAT.read({"messages": messages})
    assert sum(len(example.responses) for example in found.examples) == 2


@pytest.mark.parametrize(
    ("speaker", "role"), [item for item in SHAREGPT_ROLES.items() if item[1] != "system"]
)
def test_every_name_of_a_speaker_is_known(speaker: str, role: str) -> None:
    turns = [{"from": "human" if role == "assistant" else speaker, "value": "a"}]
    turns.append({"from": speaker if role == "assistant" else "gpt", "value": "x"})
    assert CHAT.read({"conversations": turns}) == CHAT.read({"prompt": "a", "response": "x"})


def test_what_opens_a_sharegpt_chat_is_context() -> None:
    turns = [{"from": "gpt", "value": "Hello."}, *TURNS]
    (example,) = CHAT.read({"conversations": turns}).examples
    (span,) = example.responses
    assert TOKENIZER.decode(example.tokens[span.start : span.stop]) == "x"


def test_tools_and_thinking_of_a_sharegpt_record_reach_the_template() -> None:
    reader = RecordReader(tokenizer=TOKENIZER, template=RICH)
    tools = [{"type": "function", "function": {"name": "look", "description": "d"}}]
    found = reader.read({"conversations": TURNS, "tools": tools, "thinking": True})
    text = TOKENIZER.decode(found.examples[0].tokens, controls=True)
    assert "declaration:look" in text
    assert "<|think|>" in text


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"instruction": "Add.", "input": "1 and 2", "output": "3"}, "Add.\n\n1 and 2"),
        ({"instruction": "Add.", "input": "", "output": "3"}, "Add."),
        ({"instruction": "Add.", "output": "3"}, "Add."),
        ({"instruction": "Add.", "input": None, "output": "3"}, "Add."),
    ],
)
def test_an_alpaca_record_is_a_prompt_and_a_response(record: Any, prompt: str) -> None:
    assert CHAT.read(record) == CHAT.read({"prompt": prompt, "response": "3"})


@pytest.mark.parametrize("reader", [RAW, NO_TEMPLATE])
def test_without_a_chat_template_alpaca_has_its_own_prompts(reader: RecordReader) -> None:
    found = reader.read({"instruction": "Add {x}.", "input": "1", "output": "3"})
    prompt = (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n### Instruction:\nAdd {x}.\n\n"
        "### Input:\n1\n\n### Response:\n"
    )
    assert found == reader.read({"prompt": prompt, "response": "3"})
    found = reader.read({"instruction": "Add.", "output": "3"})
    prompt = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the "
        "request.\n\n### Instruction:\nAdd.\n\n### Response:\n"
    )
    assert found == reader.read({"prompt": prompt, "response": "3"})


def test_thinking_of_an_alpaca_record_reaches_the_template() -> None:
    reader = RecordReader(tokenizer=TOKENIZER, template=RICH)
    record = {"instruction": "a", "output": "x", "thinking": True}
    assert reader.read(record) == reader.read({"prompt": "a", "response": "x", "thinking": True})


def of(*turns: Any) -> dict[str, Any]:
    return {"conversations": list(turns)}


@pytest.mark.parametrize(
    ("reader", "record", "problem"),
    [
        (CHAT, {"conversations": "a"}, "conversations is of type str; give a list of turns"),
        (CHAT, of(), "messages is empty"),
        (CHAT, of("a"), "turn 1 of conversations is of type str; give an object"),
        (CHAT, of(*TURNS, {"role": "user", "content": "a"}), "turn 3 .* 'role', .* Rename 'conversations'"),
        (CHAT, of({"from": "human", "value": "a", "weight": 0}), "turn 1 .* the unknown key 'weight'"),
        (CHAT, of({"from": "human"}), "turn 1 of conversations: 'value' is missing or null"),
        (CHAT, of({"from": "human", "value": 7}), "'value' is of type int; give a string"),
        (CHAT, of({"value": "a"}), "turn 1 of conversations is from 'None'; known are system, human"),
        (CHAT, of({"from": "humans", "value": "a"}), "from 'humans'; .*did you mean 'human'"),
        (CHAT, of({"from": ["human"], "value": "a"}), "known are system, human, user, gpt"),
        (CHAT, of(*TURNS, {"from": "observation", "value": "a"}), "turn 3 .* no fixed form for tools"),
        (CHAT, of(TURNS[1]), "hold no reply"),
        (CHAT, {**of(*TURNS), "system": "s"}, "the unknown key 'system'"),
        (CHAT, {**of(*TURNS), "messages": []}, "it has both 'messages' and 'conversations'"),
        (RAW, of(*TURNS), "holds messages, but prompts are raw"),
        (CHAT, {"instruction": "a", "input": "b"}, "'instruction' and no 'output'; give the text to learn"),
        (CHAT, {"instruction": "a", "output": 3}, "output is of type int; give a string"),
        (CHAT, {"instruction": 3, "output": "a"}, "instruction is of type int; give a string"),
        (CHAT, {"instruction": "a", "input": ["b"], "output": "c"}, "input is of type list; give a string"),
        (CHAT, {"instruction": "a", "output": "b", "outptu": "c"}, "'outptu'; did you mean 'output'"),
        (CHAT, {"instruction": "a", "output": "b", "text": "c"}, "both 'text' and 'instruction'. Name those"),
        (RAW, {"instruction": "a", "output": "b", "thinking": True}, "a raw prompt has no place"),
    ],
    ids=range(22),
)  # fmt: skip
def test_a_faulty_record_is_refused(reader: RecordReader, record: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        reader.read(record)


def test_a_faulty_turn_is_told_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    bad = {"conversations": [{"from": "nobody", "value": "a"}]}
    file.write_text(json.dumps({"conversations": TURNS}) + "\n" + json.dumps(bad) + "\n")
    source = open_files([file], CHAT)
    source.read(0, epoch=0, seed=0)
    with pytest.raises(InputError, match=r"d\.jsonl:2: turn 1 of conversations is from 'nobody'"):
        source.read(1, epoch=0, seed=0)
