"""Edits: a region of a file, rewritten in several rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dgemma.errors import InputError
from dgemma.server.edit.prompt import FIELD, parse_edit_message
from dgemma.server.edit.protocol import (
    EditChange,
    EditChoice,
    EditCompletionResponse,
    EditDetails,
    EditRequest,
    EditResponseMessage,
)
from dgemma.server.http.errors import context_too_long, invalid
from dgemma.server.outputs import task_usage
from dgemma.server.plan import ResponseWriter, ServingPlan, TaskCounts, TaskOutcome
from dgemma.server.protocol import ResponseModel
from dgemma.server.serving import ResponseHead, ServingBase, request_seed
from dgemma.tasks.edit import Edited, EditOptions, edit
from dgemma.text.tokenizer import Tokenizer

# Each canvas of a region is scored with all text before it.
MAX_CANVASES = 32


class EditServing(ServingBase):
    """The handler of /v1/edit/completions."""

    def create_edit(self, request: EditRequest) -> ServingPlan[Edited]:
        message = parse_edit_message(request.text)
        head = self.head(request, "edit")
        seed = request_seed(request)
        task = self.task_context(request, id_=head.id, seed=seed)
        encode = task.tokenizer.encode
        try:
            region = len(encode(message.region))
            around = sum(len(encode(text)) for text in (message.before, message.after, message.instruction))
        except InputError as error:
            raise invalid(f"messages: {error}", FIELD) from None
        most = self.settings.max_prompt_tokens or task.max_positions
        if 1 + region + around > most:
            raise context_too_long(
                f"messages has {1 + region + around} tokens; this server takes at most {most}. Shorten it.",
                FIELD,
            )
        widest = MAX_CANVASES * task.canvas_len
        if region > widest:
            raise context_too_long(
                f"the region to rewrite has {region} tokens; at most {widest} are taken. Give a smaller one.",
                FIELD,
            )
        if request.max_tokens is not None and region > request.max_tokens:
            raise invalid(
                f"max_tokens is {request.max_tokens}; the region has {region} tokens, and comes back as a "
                "whole. "
                "Raise it, or give a smaller region.",
                "max_tokens",
            )
        rounds = edit(
            task,
            message.region,
            message.instruction,
            EditOptions(),
            before=message.before,
            after=message.after,
        )
        writer = EditWriter(
            head=head,
            region=message.region,
            tokenizer=task.tokenizer,
            prompt_tokens=1 + region + around,
            seed=seed,
        )
        return ServingPlan(
            model=request.model,
            start=lambda _: (rounds,),
            num_choices=1,
            writer=writer,
            deadline_s=self.deadline_s(task),
            default_field=FIELD,
        )


@dataclass(frozen=True, kw_only=True)
class EditWriter(ResponseWriter[Edited]):
    """Writes a rewritten region as Mercury's API does."""

    head: ResponseHead
    region: str
    tokenizer: Tokenizer
    prompt_tokens: int
    seed: int

    def counts(self, outcome: TaskOutcome[Edited]) -> TaskCounts:
        text = self._text(outcome)
        return TaskCounts(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(self.tokenizer.encode(text)),
            reason="deadline" if outcome.result is None else "stop",
            text=text,
        )

    def response(self, outcomes: Sequence[TaskOutcome[Edited]]) -> ResponseModel:
        (outcome,) = outcomes
        counts, result = self.counts(outcome), outcome.result
        changes = () if result is None else result.changes
        details = EditDetails(
            seed=self.seed,
            finish_reason="deadline" if result is None else "stop",
            changes=[EditChange(**vars(change)) for change in changes],
            num_windows=0 if result is None else result.num_windows,
            denoising_steps=outcome.usage.forwards,
        )
        choice = EditChoice(
            index=0,
            message=EditResponseMessage(role="assistant", content=self._text(outcome)),
            finish_reason="length" if result is None else "stop",
            dgemma=details,
        )
        usage = task_usage(outcomes, counts.prompt_tokens, counts.completion_tokens)
        return EditCompletionResponse(**self.head.fields("edit.completion"), choices=[choice], usage=usage)

    def _text(self, outcome: TaskOutcome[Edited]) -> str:
        """The new region; unchanged if the deadline came first."""
        return self.region if outcome.result is None else outcome.result.text
