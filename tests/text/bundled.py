"""What the text tests share: the bundled tokenizer, the reference's, a template with tools and thinking."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

import dgemma
from dgemma.text.chat_template import ChatTemplate
from dgemma.text.tokenizer import Tokenizer

DIRECTORY = Path(dgemma.__file__).parent / "data" / "tokenizer"
TOKENIZER = Tokenizer.from_directory(DIRECTORY)

# A chat in Gemma 4's manner, written for these tests.
RICH_TEMPLATE = """\
{%- macro value_of(value) -%}
  {%- if value is string -%}{{ '<|"|>' + value + '<|"|>' }}
  {%- elif value is boolean -%}{{ 'true' if value else 'false' }}
  {%- elif value is none -%}null
  {%- elif value is mapping -%}{{ '{' }}{{ entries_of(value) }}{{ '}' }}
  {%- elif value is iterable -%}
    [{%- for item in value -%}{{ value_of(item) }}{{ ',' if not loop.last }}{%- endfor -%}]
  {%- else -%}{{ value }}
  {%- endif -%}
{%- endmacro -%}
{%- macro entries_of(entries) -%}
  {%- for key, value in entries | dictsort -%}
    {{ key }}:{{ value_of(value) }}{{ ',' if not loop.last }}
  {%- endfor -%}
{%- endmacro -%}
{{ bos_token }}
{%- set rest = messages -%}
{%- if enable_thinking or tools or messages[0].role == 'system' -%}
  {{ '<|turn>system\\n' }}
  {%- if enable_thinking -%}{{ '<|think|>' }}{%- endif -%}
  {%- if messages[0].role == 'system' -%}
    {{ messages[0].content | trim }}
    {%- set rest = messages[1:] -%}
  {%- endif -%}
  {%- for tool in tools or [] -%}
    <|tool>declaration:{{ tool.function.name }}{description:{{ value_of(tool.function.description) }}
    {%- if tool.function.parameters -%},parameters:{{ value_of(tool.function.parameters) }}{%- endif -%}
    }<tool|>
  {%- endfor -%}
  {{ '<turn|>\\n' }}
{%- endif -%}
{%- set state = namespace(in_model_turn=false) -%}
{%- for message in rest -%}
  {%- if message.role == 'tool' -%}
    <|tool_response>response:{{ message.name }}{value:{{ value_of(message.content) }}}<tool_response|>
  {%- else -%}
    {%- if not (state.in_model_turn and message.role == 'assistant') -%}
      {{ '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {%- endif -%}
    {%- if message.reasoning_content -%}
      {{ '<|channel>thought\\n' + message.reasoning_content + '<channel|>' }}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
      <|tool_call>call:{{ call.function.name }}{{ '{' }}{{ entries_of(call.function.arguments) }}{{ '}' -}}
      <tool_call|>
    {%- endfor -%}
    {{ (message.content or '') | trim }}
    {%- set state.in_model_turn = message.tool_calls is defined -%}
    {%- if not message.tool_calls -%}{{ '<turn|>\\n' }}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not state.in_model_turn -%}{{ '<|turn>model\\n' }}{%- endif -%}
"""
TEMPLATE = ChatTemplate.from_directory(DIRECTORY, TOKENIZER)
RICH = ChatTemplate(RICH_TEMPLATE, TOKENIZER)
_NAMES = re.compile("(" + "|".join(map(re.escape, sorted(TOKENIZER.controls, key=len, reverse=True))) + ")")
# Text that spells no control; what the reference does with the rest is what we do not want.
honest_text = st.text().filter(lambda text: not _NAMES.search(text))


def ids_of(text: str) -> list[int]:
    """Ids in which the control names that `text` spells are controls: what a model would write."""
    ids: list[int] = []
    for part in _NAMES.split(text):
        ids += [TOKENIZER.controls[part]] if part in TOKENIZER.controls else TOKENIZER.encode(part)
    return ids


def controls_in(ids: list[int]) -> list[int]:
    return [id_ for id_ in ids if id_ in TOKENIZER.controls.values()]


@cache
def reference() -> Any:
    """The same directory as Transformers reads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DIRECTORY)


def edited_copy(directory: Path, **changes: Any) -> Path:
    """The bundled directory with parts of `tokenizer.json` changed; `model` is merged."""
    directory.mkdir(exist_ok=True)
    for file in DIRECTORY.iterdir():
        shutil.copy(file, directory)
    raw = json.loads((directory / "tokenizer.json").read_text("utf-8"))
    raw["model"] |= changes.pop("model", {})
    (directory / "tokenizer.json").write_text(json.dumps(raw | changes), "utf-8")
    return directory


def added(content: str, id_: int, *, special: bool = False) -> dict[str, Any]:
    return {
        "id": id_, "content": content, "special": special,
        "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
    }  # fmt: skip


def bundled_added_tokens() -> list[dict[str, Any]]:
    raw = json.loads((DIRECTORY / "tokenizer.json").read_text("utf-8"))
    tokens: list[dict[str, Any]] = raw["added_tokens"]
    return tokens
