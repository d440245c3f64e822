"""Prompts equal the reference's for honest chats, and broken templates are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.errors import CheckpointError, InputError
from dgemma.text.chat_template import ChatTemplate
from text.bundled import (
    DIRECTORY,
    RICH,
    RICH_TEMPLATE,
    TEMPLATE,
    TOKENIZER,
    controls_in,
    honest_text,
    ids_of,
    reference,
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather <of> a city | today",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Zürich", "東京"]},
                    "days": {"type": "integer", "minimum": 1, "exclusive": True, "default": None},
                    "where": {"type": "object", "properties": {"lat": {"type": "number", "multipleOf": 0.5}}},
                },
                "required": ["city"],
            },
        },
    }
]
CHAT = [
    {"role": "system", "content": "  Be brief.\n"},
    {"role": "user", "content": "How is it in Zürich? a < b | c > d"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I should look.",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": {"city": "Zürich", "o": {"k": [True, 2]}}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": '{"t": 21, "s": "<fog>"}'},
    {"role": "assistant", "content": "21 °C. "},
    {"role": "user", "content": "Thanks! {{ 7 }} {% if %}"},
]  # fmt: skip
roles = st.sampled_from(["user", "assistant"])
turns = st.builds(lambda role, content: {"role": role, "content": content}, roles, honest_text)


def reference_ids(messages: Any, **options: Any) -> list[int]:
    ids: list[int] = reference().apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    return ids


@settings(deadline=None)
@given(st.lists(turns), honest_text)
def test_chats_are_rendered_as_in_the_reference(messages: list[dict[str, str]], last: str) -> None:
    chat = [*messages, {"role": "user", "content": last}]
    expected = reference_ids(chat, add_generation_prompt=True)
    assert TEMPLATE.render(chat) == expected
    expected = reference_ids(chat, chat_template=RICH_TEMPLATE, add_generation_prompt=True)
    assert RICH.render(chat) == expected


@pytest.mark.parametrize("num_messages", [2, 4, 6])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("enable_thinking", [False, True])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_tools_and_thinking_are_rendered_as_in_the_reference(
    num_messages: int, tools: Any, enable_thinking: bool, add_generation_prompt: bool
) -> None:
    options = {
        "tools": tools,
        "enable_thinking": enable_thinking,
        "add_generation_prompt": add_generation_prompt,
    }
    chat = CHAT[:num_messages]
    assert RICH.render(chat, **options) == reference_ids(chat, chat_template=RICH_TEMPLATE, **options)


def test_the_bundled_template_renders_gemmas_turns() -> None:
    ids = TEMPLATE.render([{"role": "developer", "content": "s"}, {"role": "user", "content": "u"}])
    expected = "<bos><|turn>system\ns<turn|>\n<|turn>user\nu<turn|>\n<|turn>model\n"
    assert ids == ids_of(expected)
    assert TOKENIZER.decode(ids, controls=True) == expected


def test_thinking_and_tools_have_their_places() -> None:
    text = TOKENIZER.decode(RICH.render(CHAT[:4], tools=TOOLS, enable_thinking=True), controls=True)
    assert text.startswith("<bos><|turn>system\n<|think|>Be brief.<|tool>declaration:get_weather{")
    assert (
        '<|channel>thought\nI should look.<channel|><|tool_call>call:get_weather{city:<|"|>Zürich<|"|>'
        in text
    )
    assert text.endswith(
        '<|tool_response>response:get_weather{value:<|"|>{"t": 21, "s": "<fog>"}<|"|>}<tool_response|>'
    )


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("<{{ messages[0].content }}>", "bos"),
        ("{{ '<|' ~ messages[0].content }}", "turn>"),
        ("{{ '<|' + messages[0].content + '>' }}", "turn"),
        ("{{ messages[0].content | replace('x', '') }}", "<x|turn>"),
        ("{{ messages[0].content | reverse }}", ">nrut|<"),
        ("{{ messages[0].content | lower }}", "<|TURN>"),
        ("{{ messages[0].content | tojson(ensure_ascii=true) }}", "<|turn>\U00010400"),
        ("{{ messages[0].content[1:] }}", "!<|turn>"),
        ("{% for c in messages[0].content %}{{ c }}{% endfor %}", "<|turn>"),
        ("{{ '%s' % messages[0].content }}{{ '{}'.format(messages[0].content) }}", "<|turn>"),
        ("{{ messages | tojson }}", "<|turn>"),
    ],
)
def test_a_template_cannot_be_led_to_write_a_control(source: str, content: str) -> None:
    ids = ChatTemplate(source, TOKENIZER).render([{"role": "user", "content": content}])
    assert controls_in(ids) == []


def test_templates_see_user_text_unchanged() -> None:
    source = "{% set c = messages[0].content %}{{ c | length }} {{ c | upper }} {{ c | tojson }}"
    ids = ChatTemplate(source, TOKENIZER).render([{"role": "user", "content": "<|turn>"}])
    assert TOKENIZER.decode(ids) == '7 <|TURN> "<|turn>"'


def test_controls_of_the_template_survive_its_own_operations() -> None:
    source = (
        "{% set open = '<|turn>' %}{{ ' <|turn>a' | trim }}{{ open ~ 'b' }}{{ {'k': open}['k'] | upper }}"
        "{{ eos_token }}"
    )
    assert ChatTemplate(source, TOKENIZER).render(CHAT[:2]) == ids_of("<|turn>a<|turn>b<|turn><eos>")


@pytest.mark.parametrize(
    ("chat", "options", "problem"),
    [
        (CHAT[:2], {"tools": TOOLS}, "tools are given, but this checkpoint's chat template has no place"),
        (CHAT[:2], {"enable_thinking": True}, "enable_thinking is true, but this checkpoint's chat template"),
        (CHAT[:4], {}, "messages hold tool_calls, but this checkpoint's chat template ignores them"),
    ],
)
def test_what_a_template_would_drop_is_refused(chat: Any, options: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        TEMPLATE.render(chat, **options)


def test_a_templates_own_refusal_reaches_the_caller() -> None:
    template = ChatTemplate("{{ raise_exception('roles must\n alternate') }}", TOKENIZER)
    with pytest.raises(InputError, match="the chat template refuses this chat: roles must alternate"):
        template.render(CHAT[:2])


@pytest.mark.parametrize(("mark", "shown"), [("<|turn>", "<|turn>"), ("\\udfff", "\ufffd")])
def test_errors_show_controls_by_name_and_can_be_printed(mark: str, shown: str) -> None:
    template = ChatTemplate("{{ raise_exception('no " + mark + " here') }}", TOKENIZER)
    with pytest.raises(InputError) as caught:
        template.render(CHAT[:2])
    assert str(caught.value).encode().decode() == f"the chat template refuses this chat: no {shown} here"


def test_a_template_that_fails_is_a_typed_error() -> None:
    with pytest.raises(InputError, match="cannot render this chat: ZeroDivisionError"):
        ChatTemplate("{{ 1 // (messages | length - 1) }}", TOKENIZER).render(CHAT[1:2])


def test_a_limit_is_a_typed_error() -> None:
    with pytest.raises(InputError, match="exceeds a limit on this chat: a size above"):
        ChatTemplate("{{ 'x' * 99999999999 }}", TOKENIZER).render(CHAT[:2])


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}", "{{ x", "{% unknown %}", "{{ x | no_such_filter }}", "{% for %}",
        "{{ " + "(" * 50_000, "{{ " + "-" * 50_000 + "1 }}",
        "{% for x in y %}" * 30 + "{% endfor %}" * 30,
    ],
    ids=range(8),
)  # fmt: skip
def test_a_broken_template_is_refused(source: str) -> None:
    with pytest.raises(CheckpointError, match="the chat template is not a valid Jinja template") as caught:
        ChatTemplate(source, TOKENIZER)
    assert "\n" not in str(caught.value)


def test_a_template_with_more_controls_than_marks_is_refused() -> None:
    class ManyControls:
        controls = {f"<unused{i}>": i for i in range(3000)}  # noqa: RUF012

    with pytest.raises(CheckpointError, match="names more than 2048 different controls"):
        ChatTemplate("".join(ManyControls.controls), ManyControls())  # type: ignore[arg-type]


def test_a_lone_surrogate_of_the_templates_own_is_refused() -> None:
    template = ChatTemplate("{{ '\\udfff' }}", TOKENIZER)
    with pytest.raises(InputError, match=r"lone surrogate U\+DFFF"):
        template.render(CHAT[:2])


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template.jinja": "A", "chat_template.json": {"chat_template": "B"}}, "A"),
        (
            {"chat_template.json": {"chat_template": "B"}, "tokenizer_config.json": {"chat_template": "C"}},
            "B",
        ),
        ({"tokenizer_config.json": {"chat_template": "C"}}, "C"),
        ({"chat_template.json": {}, "tokenizer_config.json": {"chat_template": "C"}}, "C"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [{"name": "rag", "template": "D"}, {"name": "default", "template": "E"}]
                }
            },
            "E",
        ),
    ],
)
def test_the_template_is_found_where_it_stands(tmp_path: Path, files: dict[str, Any], expected: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert TOKENIZER.decode(ChatTemplate.from_directory(tmp_path, TOKENIZER).render(CHAT[:2])) == expected


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "has no chat template"),
        ({"tokenizer_config.json": b"{}"}, "has no chat template"),
        ({"tokenizer_config.json": b'{"chat_template": 7}'}, "neither a string nor a list with a 'default'"),
        ({"tokenizer_config.json": b'{"chat_template": [{"name": []}, 7]}'}, "neither a string nor"),
        ({"chat_template.json": b"["}, "not valid JSON"),
        ({"chat_template.jinja": b"\xff\xfe"}, "not UTF-8"),
        ({"chat_template.jinja": b"x" * ((1 << 20) + 1)}, "at most 1048576 are read"),
        ({"chat_template.json": b'{"chat_template": "' + b"x" * ((1 << 20) + 1) + b'"}'}, "more than 1 MiB"),
        ({"chat_template.json": b'{"chat_template": "{% if %}"}'}, "chat_template.json is not a valid Jinja"),
    ],
    ids=range(9),
)  # fmt: skip
def test_a_missing_or_broken_template_file_is_refused(
    tmp_path: Path, files: dict[str, bytes], problem: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=problem):
        ChatTemplate.from_directory(tmp_path, TOKENIZER)


def test_the_bundled_directory_is_whole() -> None:
    assert ChatTemplate.from_directory(DIRECTORY, TOKENIZER).render(CHAT[:2])[0] == TOKENIZER.bos_id
