"""The chat template of a checkpoint: messages to token ids. Only the template writes control tokens.

User text never becomes a control token. Before rendering, each control in the template's own texts is
replaced by one lone surrogate, its mark. User text is checked to have no surrogates, so each surrogate in the
rendered prompt is a control of the template, and the text between two of them is encoded as ordinary text.
User text is passed unchanged, so that `trim`, `length`, `upper` and `tojson` work.

A template must therefore write each control as one literal (`'<|turn>' + role`), not assemble it from parts
(`'<|' + role + '>'`). No released Gemma template does that.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dgemma.errors import CheckpointError, InputError
from dgemma.gguf_file import is_gguf, read_gguf
from dgemma.images.prompt import ImageMarks, ImagePrompt, PrepareImage, place_images, text_only
from dgemma.text.json_value import JsonReader
from dgemma.text.messages import MessageImage, holds_images, read_messages, read_tools
from dgemma.text.template_process import TEMPLATES
from dgemma.text.template_protocol import FIRST_MARK, ReplyKind
from dgemma.text.tokenizer import Tokenizer, read_object, read_text

MAX_TEMPLATE_BYTES = 1 << 20
_MAX_CONFIG_BYTES = 16 << 20
_TEMPLATE_IN_GGUF = "tokenizer.chat_template"
_LAST_MARK = 0xDFFF
MARKS = re.compile("([\ud800-\udfff])")


class ChatTemplate:
    """One template, compiled for one tokenizer."""

    def __init__(self, source: str, tokenizer: Tokenizer, *, origin: str = "the chat template") -> None:
        self._tokenizer = tokenizer
        self._origin = origin
        self._source = source
        if len(source) > MAX_TEMPLATE_BYTES:
            raise CheckpointError(
                f"{origin} has more than {MAX_TEMPLATE_BYTES >> 20} MiB; it is no template."
            )
        self._ids: dict[str, int] = {}  # mark -> control token id
        self._marks: dict[str, str] = {}  # control name -> mark
        self._used, known = self._compile()
        for name in self._used:
            self._mark_of(name)
        self._control_variables = {
            variable: self._mark_of(name) for variable, name in tokenizer.template_names.items()
        }
        self.takes_tools = "tools" in known
        self.takes_tool_calls = "tool_calls" in source
        self.takes_thinking = "enable_thinking" in known

    @classmethod
    def from_directory(cls, path: str | Path, tokenizer: Tokenizer) -> ChatTemplate:
        """The template of `chat_template.jinja`, `chat_template.json` or `tokenizer_config.json`."""
        directory = Path(path)
        gguf = read_gguf(directory) if is_gguf(directory) else None
        if gguf is not None:
            directory = directory.parent
        file = directory / "chat_template.jinja"
        if file.is_file():
            return cls(read_text(file, max_bytes=MAX_TEMPLATE_BYTES), tokenizer, origin=str(file))
        if gguf is not None:
            source = gguf.text(_TEMPLATE_IN_GGUF, max_bytes=MAX_TEMPLATE_BYTES)
            if source is not None:
                return cls(source, tokenizer, origin=f"{gguf.path}: {_TEMPLATE_IN_GGUF}")
        for name in ("chat_template.json", "tokenizer_config.json"):
            file = directory / name
            config = read_object(file, max_bytes=_MAX_CONFIG_BYTES) if file.is_file() else {}
            if config.get("chat_template") is not None:
                return cls(_default_template(config["chat_template"], file), tokenizer, origin=str(file))
        raise CheckpointError(
            f"{directory} has no chat template: neither chat_template.jinja nor one in chat_template.json "
            "or tokenizer_config.json. Chat needs one; plain prompts work without it."
        )

    def with_tokenizer(self, tokenizer: Tokenizer) -> ChatTemplate:
        """The same template with another tokenizer of the same vocabulary."""
        changed = copy.copy(self)
        changed._tokenizer = tokenizer
        return changed

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool = False,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The prompt's token ids. No text of messages or tools becomes a control token."""
        return self.encode_marked(
            self.render_marked(
                messages,
                tools=tools,
                enable_thinking=enable_thinking,
                add_generation_prompt=add_generation_prompt,
            )
        )

    def render_with_images(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        prepare: PrepareImage | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool = False,
    ) -> ImagePrompt:
        """The prompt of messages that may hold parts {"type": "image", "image": RgbImage or ImagePatches}.

        prepare: makes the patches of an image, or returns those that are made; None: the model reads text
          only, and images are refused.
        """
        if prepare is None and holds_images(messages):
            raise text_only("messages", "hold an image")
        images: list[MessageImage] = []
        marked = self.render_marked(messages, tools=tools, enable_thinking=enable_thinking, images=images)
        tokens = self.encode_marked(marked)
        if not images:
            return ImagePrompt(tuple(tokens))
        marks = self.image_marks
        assert prepare is not None
        assert marks is not None
        if tokens.count(marks.image) != len(images):
            raise InputError.about(
                "messages",
                f"hold {len(images)} images, of which this checkpoint's chat template drops some, or writes "
                "some twice. Send them in user messages.",
            )
        return place_images(tokens, [prepare(image) for image in images], marks)

    @property
    def image_marks(self) -> ImageMarks | None:
        """The control tokens of images, if the tokenizer has them."""
        ids = [self._tokenizer.id_of(name) for name in self._tokenizer.image_names]
        found = [id_ for id_ in ids if id_ is not None]
        return ImageMarks(*found) if len(found) == len(ids) else None

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool = False,
        add_generation_prompt: bool = True,
        images: list[MessageImage] | None = None,
    ) -> str:
        """The prompt as text in which each control token is its mark.

        images: takes the images of the messages; None: they are refused.
        """
        reader = JsonReader()
        chat = read_messages(messages, reader, for_reply=add_generation_prompt, images=images)
        declared = read_tools(tools, reader)
        self._refuse_what_would_be_dropped(chat, declared, enable_thinking)
        takes_images = self.image_marks is not None and self._tokenizer.image_names[0] in self._used
        if images and not takes_images:
            raise InputError.about(
                "messages", "hold an image, but this checkpoint's chat template has no place for images."
            )
        return self._render_bounded(
            {
                "messages": chat,
                "tools": declared,
                "documents": None,
                "enable_thinking": enable_thinking,
                "add_generation_prompt": add_generation_prompt,
            }
        )

    def encode_marked(self, marked: str, known: dict[str, list[int]] | None = None) -> list[int]:
        """The ids of a marked text: marks become control tokens, the rest is encoded as text.

        known: cache of encoded texts; pass one dict for the growing prompts of one chat.
        """
        known = {} if known is None else known
        self._tokenizer.check_length(len(marked))
        ids: list[int] = []
        for part in MARKS.split(marked):
            control = self._ids.get(part)
            if control is None and part not in known:
                known[part] = self._tokenizer.encode(part)
            ids += known[part] if control is None else [control]
        return ids

    def shown(self, marked: str) -> str:
        """A marked text with the controls' names in place of their marks."""
        names = {mark: name for name, mark in self._marks.items()}
        return MARKS.sub(lambda match: names.get(match[0], "\ufffd"), marked)

    def _compile(self) -> tuple[tuple[str, ...], list[str]]:
        """The control names that the template uses, in the order of their marks, and its variables."""
        reply = TEMPLATES.ask(self._source, tuple(self._tokenizer.controls), None)
        if reply.kind is ReplyKind.DONE:
            found = json.loads(reply.text)
            return tuple(found["used"]), found["known"]
        what = "exceeds a limit" if reply.kind is ReplyKind.LIMIT else "is not a valid Jinja template"
        raise CheckpointError(f"{self._origin} {what}: {self._one_line(reply.text)}")

    def _render_bounded(self, variables: dict[str, Any]) -> str:
        reply = TEMPLATES.ask(self._source, self._used, {**self._control_variables, **variables})
        if reply.kind is ReplyKind.DONE:
            return reply.text
        what = self._one_line(reply.text)
        if reply.kind is ReplyKind.REFUSED:
            raise InputError(f"the chat template refuses this chat: {what}")
        if reply.kind is ReplyKind.LIMIT:
            raise InputError(f"the chat template exceeds a limit on this chat: {what}; shorten the chat.")
        raise InputError(f"the chat template cannot render this chat: {what}")

    def _one_line(self, text: str) -> str:
        """A text in one line, with the names of controls in place of their marks."""
        return " ".join(self.shown(text).split())[:200]

    def _mark_of(self, name: str) -> str:
        if name not in self._marks:
            code = FIRST_MARK + len(self._marks)
            if code > _LAST_MARK:
                raise CheckpointError(
                    f"{self._origin} names more than {len(self._marks)} different controls."
                )
            self._marks[name] = chr(code)
            self._ids[chr(code)] = self._tokenizer.controls[name]
        return self._marks[name]

    def _refuse_what_would_be_dropped(
        self, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None, enable_thinking: bool
    ) -> None:
        """A template silently ignores unknown variables; refuse input that it would drop."""
        if tools and not self.takes_tools:
            raise InputError(
                "tools are given, but this checkpoint's chat template has no place for them.", field="tools"
            )
        if not self.takes_tool_calls and any("tool_calls" in message for message in chat):
            raise InputError(
                "messages hold tool_calls, but this checkpoint's chat template ignores them.",
                field="messages",
            )
        if enable_thinking and not self.takes_thinking:
            raise InputError(
                "enable_thinking is true, but this checkpoint's chat template cannot switch it.",
                field="enable_thinking",
            )


def _default_template(entry: object, file: Path) -> str:
    """The entry is a template, or a list of named ones of which `default` is used."""
    if isinstance(entry, list):
        named = [item for item in entry if isinstance(item, dict) and item.get("name") == "default"]
        entry = named[0].get("template") if named else None
    if not isinstance(entry, str):
        raise CheckpointError(f"{file}: chat_template is neither a string nor a list with a 'default'.")
    return entry
