"""The token spans of the assistant's replies in a chat, so that training predicts what inference generates.

At inference the prompt is `template.render(messages[:i])` and the model generates what follows. So for each
reply the template renders the chat before it, as a prompt, and the chat including it. Usually the first is a
prefix of the second, and the rest is the reply, up to and including its last control token, which ends the
turn. Prompt and reply are encoded separately, as at inference: encoded together, the newline of the header
could merge with one at the beginning of the reply. Headers, user turns and tool results are never part of a
reply.

Released templates do not always follow this; then the reply is the text after its own header:

- With thinking off, a prompt may end with an empty thought that history leaves out.
- After a tool result the prompt has no header, since the model's turn continues; history may have one.

Replies share one sequence as long as the tokens so far are a prefix of the next reply's prompt. Where they
are not (the template drops old thoughts, or renders a past reply differently), the next reply gets a
sequence of its own, with the prompt of inference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dgemma.errors import InputError
from dgemma.text.chat_template import MARKS, ChatTemplate
from dgemma.text.json_value import JsonReader
from dgemma.text.messages import read_messages

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class SpannedChat:
    """The tokens of a chat and [start, stop) of each reply. The exact prompt precedes each reply."""

    tokens: tuple[int, ...]
    replies: tuple[tuple[int, int], ...]


def reply_spans(
    template: ChatTemplate,
    messages: Messages,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    enable_thinking: bool = False,
    num_prompt_messages: int = 0,
) -> list[SpannedChat]:
    """The replies of a chat, usually in one sequence, which ends with the last reply.

    num_prompt_messages: the first messages, of any role, that are prompt only.
    """
    chat = read_messages(messages, JsonReader(), for_reply=False)
    known: dict[str, list[int]] = {}
    chats: list[SpannedChat] = []
    tokens: list[int] = []
    replies: list[tuple[int, int]] = []
    render = _ChatRenderer(template=template, tools=tools, enable_thinking=enable_thinking)
    header = render.header(messages, [message["role"] for message in chat])
    for index in _reply_indices(chat, num_prompt_messages):
        prompt, reply = _prompt_and_reply(render, header, messages, index)
        _refuse_what_was_dropped(chat[index], reply, index)
        prompt_ids = template.encode_marked(prompt, known)
        if replies and prompt_ids[: len(tokens)] != tokens:
            chats.append(SpannedChat(tokens=tuple(tokens), replies=tuple(replies)))
            replies = []
        tokens = prompt_ids + template.encode_marked(reply, known)
        replies.append((len(prompt_ids), len(tokens)))
    return [*chats, SpannedChat(tokens=tuple(tokens), replies=tuple(replies))]


def _reply_indices(chat: list[dict[str, Any]], num_prompt_messages: int) -> list[int]:
    """The assistant messages that answer a user or tool message. One that opens the chat is prompt."""
    roles = [message["role"] for message in chat]
    for index in range(1, len(roles)):
        if roles[index - 1] == roles[index] == "assistant":
            raise InputError(
                f"messages {index} and {index + 1} are both the assistant's; a reply follows a user or tool "
                "message. Join them, or put what came between them back."
            )
    found = [
        index
        for index in range(max(1, num_prompt_messages), len(roles))
        if roles[index] == "assistant" and roles[index - 1] in ("user", "tool")
    ]
    if not found:
        raise InputError(
            f"the chat's {len(roles)} messages hold no reply of the assistant's to a user or tool message; "
            "there is nothing to learn from it."
        )
    return found


def _prompt_and_reply(render: _ChatRenderer, header: str, messages: Messages, index: int) -> tuple[str, str]:
    """Both as marked texts."""
    template = render.template
    prompt = render(messages[:index], add_generation_prompt=True)
    chat = render(messages[: index + 1])
    if chat.startswith(prompt):
        written: str | None = chat[len(prompt) :].removeprefix(header)
    elif header and chat.count(header) == render(messages[:index]).count(header) + 1:
        own = chat[chat.rindex(header) + len(header) :]
        written = _left_to_write(template, _begun_thought(template, prompt), own)
    else:
        written = None
    if written is None:
        raise InputError(
            f"message {index + 1} cannot be learned: its prompt ends with {template.shown(prompt[-20:])!r}, "
            f"but the chat with it ends with {template.shown(chat[-40:])!r}, which is no reply to it. If one "
            "of them holds a thought and the other does not, switch 'thinking', or give or remove the "
            "message's reasoning; else use another chat template, or raw prompts."
        )
    marks = list(MARKS.finditer(written))
    if not marks or written[marks[-1].end() :].strip():
        raise InputError(
            f"message {index + 1} cannot be learned: the chat template ends it with "
            f"{template.shown(written[-20:])!r}, not with a control, so the model would not learn to stop. "
            "Let the template write <turn|> or eos_token after a reply, or use raw prompts."
        )
    return prompt, written[: marks[-1].end()]


@dataclass(frozen=True, kw_only=True)
class _ChatRenderer:
    """The template with the arguments that all prompts of a chat share."""

    template: ChatTemplate
    tools: Sequence[Mapping[str, Any]] | None
    enable_thinking: bool

    def __call__(self, messages: Messages, *, add_generation_prompt: bool = False) -> str:
        return self.template.render_marked(
            messages,
            tools=self.tools,
            enable_thinking=self.enable_thinking,
            add_generation_prompt=add_generation_prompt,
        )

    def header(self, messages: Messages, roles: list[str]) -> str:
        """The header of a reply in a prompt; empty without a control token: text could then equal it."""
        if "user" not in roles:
            return ""
        question = messages[: roles.index("user") + 1]
        chat, prompt = self(question), self(question, add_generation_prompt=True)
        begun = _begun_thought(self.template, prompt)
        header = prompt.removeprefix(chat).removesuffix(begun) if prompt.startswith(chat) else ""
        return header if MARKS.search(header) else ""


def _begun_thought(template: ChatTemplate, prompt: str) -> str:
    """A thought at the end of the prompt, open or empty and closed: `<|channel>thought\\n<channel|>`."""
    marks = list(MARKS.finditer(prompt))
    names = [template.shown(mark[0]) for mark in marks[-2:]]
    if names[-1:] == ["<|channel>"]:
        return prompt[marks[-1].start() :]
    if names == ["<|channel>", "<channel|>"]:
        return prompt[marks[-2].start() :]
    return ""


def _left_to_write(template: ChatTemplate, begun: str, written: str) -> str | None:
    """The rest of a reply whose thought the prompt has begun; None if the two contradict each other."""
    if written.startswith(begun):
        return written[len(begun) :]
    is_closed = template.shown(begun[-1]) == "<channel|>"
    return written if is_closed and template.shown(written[:1]) != "<|channel>" else None


def _refuse_what_was_dropped(message: dict[str, Any], reply: str, index: int) -> None:
    """Refuse a reply that the template does not render in full."""
    for key, name in (("content", "content"), ("reasoning_content", "reasoning")):
        # Templates trim texts, and the label of a thought may be in the prompt already.
        if message.get(key, "").strip() not in reply:
            raise InputError(
                f"message {index + 1}: its {name} is not in what the chat template writes of it, so it could "
                f"not be learned. Remove the {name}, or use a template that renders it unchanged."
            )
