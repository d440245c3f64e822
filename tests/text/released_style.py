"""Templates that treat history as the released ones do, written for these tests.

A thought is shown only in replies to the last user message. Tool results stand where the call was, inside the
model's turn; a call that has none yet ends with the control that opens one, which tells the model to stop.
"""

from __future__ import annotations

from dgemma.text.chat_template import ChatTemplate
from text.bundled import TOKENIZER

_BODY = """\
{{ bos_token }}
{%- set asked = namespace(last=-1) -%}
{%- for message in messages if message.role == 'user' -%}
  {%- set asked.last = messages.index(message, asked.last + 1) -%}
{%- endfor -%}
{%- if enable_thinking or tools -%}
  {{ '<|turn>system\\n' + ('<|think|>\\n' if enable_thinking else '') }}
  {%- for tool in tools or [] -%}{{ '<|tool>declaration:' + tool.function.name + '<tool|>' }}{%- endfor -%}
  {{ '<turn|>\\n' }}
{%- endif -%}
{%- set state = namespace(last='', open=false) -%}
{%- for message in messages -%}
  {%- set place = loop.index0 -%}
  {%- if message.role == 'tool' -%}
    {%- if not state.open -%}{{ '<|tool_response>' }}{%- endif -%}
    {{ 'response:' + message.name + '{value:<|"|>' + message.content + '<|"|>}<tool_response|>' }}
    {%- set state.last = 'result' -%}
    {%- set state.open = false -%}
  {%- else -%}
    {%- if repeats_header or not (message.role == 'assistant' and state.last == 'result') -%}
      {{ '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {%- endif -%}
    {%- if message.reasoning and place > asked.last -%}
      {{ '<|channel>thought\\n' + message.reasoning + '\\n<channel|>' }}
    {%- endif -%}
    {{ message.content | trim }}
    {%- if message.tool_calls -%}
      {%- for call in message.tool_calls -%}
        {{ '<|tool_call>call:' + call.function.name + '{' }}
        {%- for key, value in call.function.arguments | dictsort -%}
          {{ key + ':<|"|>' + value + '<|"|>' }}
        {%- endfor -%}
        {{ '}<tool_call|>' }}
      {%- endfor -%}
      {{ '<|tool_response>' }}
      {%- set state.open = true -%}
    {%- else -%}
      {{ '<turn|>\\n' }}
    {%- endif -%}
    {%- set state.last = message.role -%}
  {%- endif -%}
{%- endfor -%}
"""
_SMALL_END = """\
{%- if add_generation_prompt and state.last != 'result' -%}{{ '<|turn>model\\n' }}{%- endif -%}
"""
_LARGE_END = """\
{%- if add_generation_prompt -%}
  {%- if state.last != 'result' -%}
    {{ '<|turn>model\\n' + ('' if enable_thinking else '<|channel>thought\\n<channel|>') }}
  {%- elif enable_thinking -%}
    {{ '<|channel>thought\\n' }}
  {%- endif -%}
{%- endif -%}
"""
# The small models' prompt ends with the header; the large ones' says that there is no thought, or begins one.
SMALL = ChatTemplate(_BODY + _SMALL_END, TOKENIZER)
LARGE = ChatTemplate(_BODY + _LARGE_END, TOKENIZER)
# History has a header after a tool result, where the prompt has none.
REPEATING = ChatTemplate("{%- set repeats_header = true -%}" + _BODY + _LARGE_END, TOKENIZER)
