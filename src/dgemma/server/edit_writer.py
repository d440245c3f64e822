"""A rewritten region as Mercury's clients read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dgemma.canvas.edit import Edited
from dgemma.server.answer_facts import usage_of_work
from dgemma.server.replies import Reply
from dgemma.server.work import Counts, Done, WorkWriter
from dgemma.server.work_replies import EditChange, EditChoice, EditCompletion, EditDetails, EditMessage
from dgemma.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class EditWriter(WorkWriter[Edited]):
    head: dict[str, Any]  # what the reply begins with
    region: str
    tokenizer: Tokenizer
    prompt_tokens: int
    seed: int

    def counts(self, done: Done[Edited]) -> Counts:
        text = self._text(done)
        return Counts(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(self.tokenizer.encode(text)),
            reason="deadline" if done.result is None else "stop",
            text=text,
        )

    def whole(self, done: Sequence[Done[Edited]]) -> Reply:
        (one,) = done
        counts, result = self.counts(one), one.result
        changes = () if result is None else result.changes
        details = EditDetails(
            seed=self.seed,
            finish_reason="deadline" if result is None else "stop",
            changes=[EditChange(**vars(change)) for change in changes],
            looked_at=0 if result is None else result.looked_at,
            denoising_steps=one.tally.forwards,
        )
        choice = EditChoice(
            index=0,
            message=EditMessage(role="assistant", content=self._text(one)),
            finish_reason="length" if result is None else "stop",
            dgemma=details,
        )
        usage = usage_of_work(done, counts.prompt_tokens, counts.completion_tokens)
        return EditCompletion(**self.head, choices=[choice], usage=usage)

    def _text(self, done: Done[Edited]) -> str:
        """Where time ran out nothing was changed yet."""
        return self.region if done.result is None else done.result.text
