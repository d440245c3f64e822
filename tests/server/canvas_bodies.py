"""Requests that fill, edit and decide, as the clients there are send them."""

from __future__ import annotations

from typing import Any

FIM = "/v1/fim/completions"
INFILL = "/infill"
EDIT = "/v1/edit/completions"
DECISIONS = "/v1/decisions"
SYSTEM_ONE = "/v1/systemone"

# Completions with a suffix

PROMPT, SUFFIX = "def add(a, b):\n    ret", " + b\n"
GAP: dict[str, Any] = {"model": "dgemma", "prompt": PROMPT, "suffix": SUFFIX, "seed": 7, "max_tokens": 6}

# /infill

PREFIX, TYPED, REST = "import os\n\ndef add(a, b):\n", "    return ", "\n\nprint(add(1, 2))\n"
# As llama.vim notes them: the time is that of Vim's clock, in two numbers.
EXTRA = [{"text": "x = 1\ny = 2\n", "time": [1794826544, 77], "filename": "other.py"}]
TIMINGS = (
    "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second",
    "predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second",
)  # fmt: skip
TOLD = ["content", *(f"timings/{name}" for name in TIMINGS), "truncated", "tokens_cached"]
VIM: dict[str, Any] = {
    "id_slot": 0, "input_prefix": PREFIX, "input_suffix": REST, "input_extra": EXTRA, "prompt": TYPED,
    "n_predict": 128, "stop": [], "n_indent": 4, "top_k": 40, "top_p": 0.9,
    "samplers": ["top_k", "top_p", "infill"], "stream": False, "cache_prompt": True, "t_max_prompt_ms": 500,
    "t_max_predict_ms": 250, "response_fields": TOLD, "model": "",
}  # fmt: skip
VIM_READS_AHEAD: dict[str, Any] = {
    "id_slot": 0, "input_prefix": "", "input_suffix": "", "input_extra": EXTRA, "prompt": "", "n_predict": 0,
    "temperature": 0.0, "samplers": [], "stream": False, "cache_prompt": True, "t_max_prompt_ms": 1,
    "t_max_predict_ms": 1, "response_fields": [""],
}  # fmt: skip
VSCODE: dict[str, Any] = {
    "input_prefix": PREFIX, "input_suffix": REST, "input_extra": [{"text": "x = 1\n", "filename": "a.py"}],
    "prompt": TYPED, "n_predict": 128, "top_k": 40, "top_p": 0.99, "stream": False,
    "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "n_indent": 4, "t_max_prompt_ms": 500,
    "t_max_predict_ms": 2500,
}  # fmt: skip
VSCODE_READS_AHEAD: dict[str, Any] = {
    "input_prefix": "", "input_suffix": "", "input_extra": EXTRA, "prompt": "", "n_predict": 0,
    "samplers": [], "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1,
}  # fmt: skip

# Edits

REGION = "def greet(nmae):\n    print(name)"
# As Zed, Continue and others lay it out: tags on lines of their own, the path in the file's first line.
EDIT_CONTENT = f"""\
<|recently_viewed_code_snippets|>
<|recently_viewed_code_snippet|>
code_snippet_file_path: other.py
x = 1
<|/recently_viewed_code_snippet|>
<|/recently_viewed_code_snippets|>

<|current_file_content|>
current_file_path: greet.py
import os

<|code_to_edit|>
{REGION.replace("greet(", "greet<|cursor|>(")}
<|/code_to_edit|>

greet("you")
<|/current_file_content|>

<|edit_diff_history|>
--- greet.py
+++ greet.py
-def hello():
+def greet(nmae):
<|/edit_diff_history|>
"""
EDIT_ASKED: dict[str, Any] = {"model": "dgemma", "messages": [{"role": "user", "content": EDIT_CONTENT}]}

# Decisions

INPUT = "The parcel came late, and the box was torn."
UNHAPPY = {"type": "predicate", "name": "unhappy", "instructions": "Is the customer unhappy?"}
WHAT = {
    "type": "choice",
    "instructions": [{"type": "input_text", "text": "What is it about?"}],
    "choices": [{"value": "delivery", "description": "how it came"}, {"value": True}, {"value": "price"}],
}
HOW = {"type": "score", "instructions": "How angry?", "levels": [{"label": "calm"}, {"label": "furious"}]}
DECIDE: dict[str, Any] = {"model": "dgemma", "input": INPUT, "questions": [UNHAPPY, WHAT, HOW]}
DECIDE_BY_NAME: dict[str, Any] = {
    "model": "dgemma",
    "state": {"review": INPUT, "stars": 2},
    "questions": {
        "unhappy": {
            "type": "noul",
            "instructions": "Is the customer unhappy?",
            "criteria": {"true": "cross"},
        },
        "about": {"type": "choice", "criteria": {"delivery": "how it came", "price": None}},
        "angry": {"type": "score", "criteria": ["not at all", {"much": True}, ["very", "much"]]},
        "sure": {"type": "choice", "instructions": None, "criteria": {"the only one": None}},
    },
}
