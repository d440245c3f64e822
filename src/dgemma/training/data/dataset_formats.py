"""Records as common data sets have them, ShareGPT's and Alpaca's, in the form of our own. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgemma.errors import InputError, suggestion

# "from" of a ShareGPT turn -> the role of a message.
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
}
# Turns of tools, which each data set writes in its own way.
_TOOL_TURNS = ("function_call", "function_response", "observation", "tool", "function")

# Without a chat template: the prompts of Stanford Alpaca.
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
    "### Input:\n{input}\n\n### Response:\n"
)


def sharegpt_messages(conversations: Any) -> list[dict[str, str]]:
    """`[{"from": "human", "value": ...}, ...]` as messages."""
    if not isinstance(conversations, list | tuple):
        raise InputError.about(
            "conversations", f"is of type {type(conversations).__name__}; give a list of turns."
        )
    return [_message(turn, number) for number, turn in enumerate(conversations, start=1)]


def alpaca_prompt(entries: Mapping[Any, Any], *, is_raw: bool) -> str:
    """The prompt of an instruction and its input, if it has one. is_raw: there is no turn around it."""
    instruction, context = entries["instruction"], entries.get("input", "")
    for key, value in (("instruction", instruction), ("input", context)):
        if not isinstance(value, str):
            raise InputError.about(key, f"is of type {type(value).__name__}; give a string.")
    if is_raw:
        return (_ALPACA_WITH_INPUT if context else _ALPACA).format(instruction=instruction, input=context)
    return f"{instruction}\n\n{context}" if context else instruction


def _message(turn: Any, number: int) -> dict[str, str]:
    where = f"turn {number} of conversations"
    if not isinstance(turn, Mapping):
        raise InputError(f"{where} is of type {type(turn).__name__}; give an object.", field="conversations")
    # Tables have every key in each turn, with null for unused ones.
    entries = {key: value for key, value in turn.items() if value is not None}
    if "role" in entries and "from" not in entries:
        raise InputError(
            f"{where} has 'role', as messages do; a turn has 'from' and 'value'. Rename 'conversations' to "
            "'messages'.",
            field="conversations",
        )
    for key in entries:
        if key not in ("from", "value"):
            raise InputError(
                f"{where} has the unknown key {str(key)[:40]!r}; a turn has 'from' and 'value'.",
                field="conversations",
            )
    value = entries.get("value")
    if not isinstance(value, str):
        kind = "missing or null" if value is None else f"of type {type(value).__name__}"
        raise InputError(f"{where}: 'value' is {kind}; give a string.", field="conversations")
    return {"role": _role(entries.get("from"), where), "content": value}


def _role(speaker: Any, where: str) -> str:
    if isinstance(speaker, str) and speaker in SHAREGPT_ROLES:
        return SHAREGPT_ROLES[speaker]
    if speaker in _TOOL_TURNS:
        raise InputError(
            f"{where} is from {speaker!r}: ShareGPT has no fixed form for tools. Give the record as "
            "'messages' with 'tool_calls'.",
            field="conversations",
        )
    hint = suggestion(speaker, SHAREGPT_ROLES) if isinstance(speaker, str) and len(speaker) <= 40 else "."
    raise InputError(
        f"{where} is from {str(speaker)[:40]!r}; known are {', '.join(SHAREGPT_ROLES)}{hint}",
        field="conversations",
    )
