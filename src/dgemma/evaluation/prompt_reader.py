"""From what a task asks to the token ids that the model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dgemma.errors import InputError

if TYPE_CHECKING:
    from dgemma.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class PromptReader:
    """Text becomes one user turn, if the model has a chat template; messages are rendered; ids stay.

    raw: continue text as it is. system: in place of a conversation's own. thinking: let the model think.
    """

    lm: LanguageModel
    raw: bool = False
    system: str | None = None
    thinking: bool = False

    def __post_init__(self) -> None:
        for name in ("system", "thinking"):
            if not getattr(self, name):
                continue
            if self.raw or not self.lm.has_chat_template:
                why = "raw leaves it out" if self.raw else "this model has none"
                raise InputError(f"{name} needs the chat template, and {why}. Drop {name}.")
            self._render([{"role": "user", "content": "?"}])  # a template may refuse either

    def ids(self, prompt: Any) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.lm.has_chat_template and not self.raw:
                return self._render([{"role": "user", "content": prompt}])
            bos = self.lm.tokenizer.bos_id
            return (*(() if bos is None else (bos,)), *self.lm.tokenizer.encode(prompt))
        if isinstance(prompt, Sequence) and prompt:
            if all(isinstance(item, Mapping) for item in prompt):
                if self.raw:
                    raise InputError(
                        "the prompt is messages, and raw leaves the chat template out. Drop raw."
                    )
                return self._render(prompt)
            if all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
                if self.system or self.thinking:
                    raise InputError("the prompt is token ids, which take no system text and no thinking.")
                return tuple(prompt)
        raise InputError(f"the prompt is {prompt!r:.60}; give text, a list of messages, or token ids.")

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        if self.system:
            own = messages[0].get("role") in ("system", "developer")
            messages = [{"role": "system", "content": self.system}, *messages[1 if own else 0 :]]
        return tuple(self.lm.chat_template.render(list(messages), enable_thinking=self.thinking))
