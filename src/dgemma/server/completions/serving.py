"""Text completions: continued prompts in one round, and gaps before a suffix filled in several rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dgemma.engine.service import EngineEvent
from dgemma.errors import InputError
from dgemma.events import Answer, Commit, Draft, Finish, FinishReason, PromptScored, ScoredToken
from dgemma.server.completions.protocol import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    FillDetails,
)
from dgemma.server.gap import MeasuredGap, filled_gap, measured_gap
from dgemma.server.http.errors import context_too_long, invalid, shown
from dgemma.server.outputs import (
    CompletionLogprobs,
    CompletionLogprobWriter,
    TopLogprobs,
    answer_details,
    draft_info,
    generation_usage,
    is_cut_off,
    join_logprobs,
    prompt_logprobs,
    task_usage,
)
from dgemma.server.plan import AnyServingPlan, ResponseWriter, ServingPlan, TaskCounts, TaskOutcome
from dgemma.server.protocol import ResponseModel, UsageInfo, set_fields
from dgemma.server.response_format import RequestedFormat, requested_text_format
from dgemma.server.serving import (
    GenerationInfo,
    Prompts,
    ResponseHead,
    ServingBase,
    check_end_tokens,
    check_prompt_logprobs,
    check_streaming,
    request_seed,
)
from dgemma.server.text import TextService
from dgemma.tasks.infill import Filled

# Fields that have no meaning for a gap, why, and values that ask for what happens anyway.
_UNSUPPORTED_WITH_SUFFIX: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("logprobs", "a gap is chosen among texts of several lengths, not token by token", ()),
    ("logit_bias", "the tokens of a gap are limited by the texts around it", ({},)),
    ("diffusing", "a gap has no single canvas to show", (False,)),
    ("decode", "only a canvas can see what follows", ("diffuse",)),
    ("end_tokens", "a gap ends where the suffix begins", ()),
    ("pins", "the texts around the gap are what is pinned", ([],)),
    ("canvas", "the texts around the gap are what is given", ()),
    ("vllm_xargs", "the texts around the gap are what is given", ({},)),
    ("echo", "the client has the texts around the gap", (False,)),
    ("prompt_logprobs", "a gap is chosen among texts of several lengths, not token by token", ()),
)


class CompletionServing(ServingBase):
    """The handler of /v1/completions and /v1/fim/completions."""

    def create_completion(self, request: CompletionRequest) -> AnyServingPlan:
        return self._create_fill(request) if request.suffix else self._create_continuation(request)

    def _create_continuation(self, request: CompletionRequest) -> ServingPlan[list[Answer]]:
        self.adapter(request.model)
        response_format = self._response_format(request)
        _check_prompt_fields(request)
        texts = request.prompts
        self.check_choices(len(texts), request.n)  # before many texts are tokenized in vain
        try:
            tokens = [
                self.text.encode_prompt(prompt) if isinstance(prompt, str) else tuple(prompt)
                for prompt in texts
            ]
        except InputError as error:
            raise invalid(f"prompt: {error}", "prompt") from None
        prompts = Prompts(
            tokens=tokens, field="prompt", max_tokens=request.max_tokens, max_tokens_field="max_tokens"
        )
        check_end_tokens(request, response_format)
        info = self.generation_info(request, prompts, prefix="cmpl", logprobs=request.logprobs)
        echoed = [prompt if isinstance(prompt, str) else _text_of(self.text, prompt) for prompt in texts]
        returned = ReturnedPrompts(
            tokens=tokens,
            texts=echoed if request.echo else None,
            num_listed=request.prompt_logprobs,
            is_alone=request.max_tokens == 0,
        )
        # One list serves both forms.
        listed = (request.logprobs if request.echo else None, request.prompt_logprobs)
        wanted = [number for number in listed if number is not None]
        return self.generation_plan(
            request,
            prompts,
            info,
            CompletionWriter(info, self.text, returned),
            response_format,
            num_prompt_logprobs=max(wanted, default=None),
        )

    def _create_fill(self, request: CompletionRequest) -> ServingPlan[Filled]:
        prefix, suffix = request.prompt, request.suffix or ""
        if not isinstance(prefix, str):
            raise invalid(
                f"prompt is {shown(prefix)}; with suffix it must be one text, the one before the gap.",
                "prompt",
            )
        for name, why, usual in _UNSUPPORTED_WITH_SUFFIX:
            value = getattr(request, name)
            if value is not None and value not in usual:
                raise invalid(
                    f"{name} is {shown(value)}, which is not supported with suffix: {why}. Leave {name} out.",
                    name,
                    "unsupported_parameter",
                )
        if request.max_tokens == 0:
            raise invalid("max_tokens is 0; with suffix, give the longest gap, at least 1.", "max_tokens")
        response_format = self._response_format(request)
        text_format = None if response_format is None else requested_text_format(request)
        check_streaming(request)
        num_choices = self.check_choices(1, request.n)
        head = self.head(request, "cmpl")
        seed = request_seed(request)
        task = self.task_context(request, id_=head.id, num_choices=num_choices, seed=seed)
        gap = measured_gap(
            task,
            (prefix, suffix),
            request.max_tokens,
            most_prompt_tokens=self.settings.max_prompt_tokens,
            prompt_field="prompt",
            limit_field="max_tokens",
        )
        if not gap.fits:
            raise context_too_long(
                f"prompt has {gap.num_before} tokens; this model's context of {task.max_positions} then has "
                f"no room for a gap of {gap.max_tokens}. Shorten the prompt or lower max_tokens.",
                "prompt",
            )
        tasks = tuple(
            filled_gap(
                replace(task, seed=seed + index),
                (prefix, suffix),
                gap.max_tokens,
                None if text_format is None else text_format[1],
            )
            for index in range(num_choices)
        )
        return ServingPlan(
            model=request.model,
            start=lambda _: tasks,
            num_choices=num_choices,
            writer=FillWriter(gap=gap, seed=seed, head=head, include_usage=request.ends_with_usage),
            deadline_s=self.deadline_s(task),
            default_field="prompt" if response_format is None else response_format.field,
            response_format=response_format,
            stream=bool(request.stream),
            include_usage=request.ends_with_usage,
        )

    def _response_format(self, request: CompletionRequest) -> RequestedFormat | None:
        requested = requested_text_format(request)
        return (
            None if requested is None else RequestedFormat(field=requested[0], response_format=requested[1])
        )


def _check_prompt_fields(request: CompletionRequest) -> None:
    check_prompt_logprobs(request)
    if request.max_tokens == 0 and not request.echo and request.prompt_logprobs is None:
        raise invalid(
            "max_tokens is 0, so nothing would be returned; give at least 1, or echo or prompt_logprobs.",
            "max_tokens",
        )


def _text_of(text: TextService, tokens: Sequence[int]) -> str:
    """The text of ids as an answer has it: without controls."""
    raw = b"".join(text.token_text(token).raw or b"" for token in tokens)
    return raw.decode("utf-8", "replace")


@dataclass(frozen=True, kw_only=True)
class ReturnedPrompts:
    """What a completion returns of its prompts."""

    tokens: Sequence[tuple[int, ...]]
    texts: Sequence[str] | None  # None: without echo
    num_listed: int | None  # of prompt_logprobs
    is_alone: bool  # nothing is written after them


class CompletionWriter(ResponseWriter[list[Answer]]):
    """Writes a text completion: whole, or chunk by chunk in the same shape."""

    def __init__(self, info: GenerationInfo, text: TextService, prompts: ReturnedPrompts) -> None:
        self._info = info
        self._text = text
        self._prompts = prompts
        self._is_echoed = [prompts.texts is None] * info.num_choices
        self._num_sent = [0] * info.num_choices  # tokens whose log-probabilities were sent
        self._logprob_writers = [
            CompletionLogprobWriter(text, info.logprobs or 0) for _ in range(info.num_choices)
        ]

    def response(self, outcomes: Sequence[TaskOutcome[list[Answer]]]) -> ResponseModel:
        answers = [self._whole(answer) for answer in outcomes[0].result or []]
        choices = []
        for index, answer in enumerate(answers):
            # The answers of one prompt share its log-probabilities: they are computed once.
            scored = answers[index - index % self._per_prompt].prompt_logprobs or ()
            echoed, logprobs = self._echo(index, scored)
            own = self._logprobs(index, answer.tokens, answer.logprobs)
            parts = [part["logprobs"] for part in (logprobs, own) if part]
            choices.append(
                CompletionChoice(
                    index=index,
                    text=echoed + answer.text,
                    finish_reason="length" if is_cut_off(answer) else "stop",
                    dgemma=answer_details(self._info, answer),
                    logprobs=join_logprobs(parts) if parts else None,
                    **self._prompt_logprobs(index, scored),
                    **set_fields(reasoning_content=answer.thought),
                )
            )
        return self._response(choices, usage=generation_usage(self._info, answers))

    def opening_chunks(self) -> Iterator[ResponseModel]:
        """The prompts, unless their log-probabilities come first."""
        if self._info.logprobs is None:
            for index in range(self._info.num_choices):
                yield from self._echo_chunk(index, ())

    def event_chunks(self, index: int, event: EngineEvent) -> Iterator[ResponseModel]:
        match event:
            case Draft():
                yield self._chunk(index, draft=draft_info(event))
            case PromptScored():
                yield from self._echo_chunk(index, event.logprobs)
            case Commit():
                extra = self._logprobs(index, event.tokens, event.logprobs)
                extra |= set_fields(reasoning_content=event.thought)
                if event.text or extra:
                    yield self._chunk(index, text=event.text, **extra)
            case Finish():
                answer = self._whole(event.answer)
                # A deadline may come before the prompt was read.
                yield from self._echo_chunk(index, answer.prompt_logprobs or ())
                sent = self._num_sent[index]
                rest = None if answer.logprobs is None else answer.logprobs[sent:]
                extra = self._logprobs(index, answer.tokens[sent:], rest)
                yield self._chunk(
                    index,
                    finish_reason="length" if is_cut_off(answer) else "stop",
                    dgemma=answer_details(self._info, answer),
                    **extra,
                )

    def usage_chunk(self, outcomes: Sequence[TaskOutcome[list[Answer]]]) -> ResponseModel:
        return self._response([], usage=generation_usage(self._info, outcomes[0].result or []))

    @property
    def _per_prompt(self) -> int:
        return self._info.num_choices // self._info.num_prompts

    def _whole(self, answer: Answer) -> Answer:
        """Where nothing is to be written, the length is what ends the answer."""
        if self._prompts.is_alone and answer.finish_reason is FinishReason.STOP:
            return replace(answer, finish_reason=FinishReason.LENGTH)
        return answer

    def _echo_chunk(self, index: int, scored: Sequence[ScoredToken]) -> Iterator[ResponseModel]:
        if not self._is_echoed[index]:
            self._is_echoed[index] = True
            text, logprobs = self._echo(index, scored)
            if text or logprobs:
                yield self._chunk(index, text=text, **logprobs)

    def _echo(self, index: int, scored: Sequence[ScoredToken]) -> tuple[str, dict[str, CompletionLogprobs]]:
        """The text of the prompt of a choice, and its log-probabilities if there are any."""
        if self._prompts.texts is None:
            return "", {}
        number = index // self._per_prompt
        text = self._prompts.texts[number]
        if self._info.logprobs is None:
            return text, {}
        writer = self._logprob_writers[index]
        return text, {"logprobs": writer.add_prompt(self._prompts.tokens[number], scored, text)}

    def _prompt_logprobs(self, index: int, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        if self._prompts.num_listed is None:
            return {}
        num_tokens = len(self._prompts.tokens[index // self._per_prompt])
        found = prompt_logprobs(self._text, scored, num_tokens, self._prompts.num_listed)
        return {"prompt_logprobs": found}

    def _logprobs(self, index: int, tokens: Sequence[int], top: TopLogprobs | None) -> dict[str, Any]:
        if self._info.logprobs is None or not top:
            return {}
        self._num_sent[index] += len(tokens)
        return {"logprobs": self._logprob_writers[index].add(tokens, top)}

    def _chunk(self, index: int, **choice: Any) -> CompletionResponse:
        choice = {"text": "", "finish_reason": None, **choice}
        usage = {"usage": None} if self._info.include_usage else {}
        return self._response([CompletionChoice(index=index, **choice)], **usage)

    def _response(self, choices: list[CompletionChoice], **usage: Any) -> CompletionResponse:
        return CompletionResponse(**self._info.head.fields("text_completion"), choices=choices, **usage)


@dataclass(frozen=True, kw_only=True)
class FillWriter(ResponseWriter[Filled]):
    """Writes a completion with a suffix: the choices are filled gaps."""

    gap: MeasuredGap
    seed: int  # of the first choice
    head: ResponseHead
    include_usage: bool

    def counts(self, outcome: TaskOutcome[Filled]) -> TaskCounts:
        return self.gap.counts(outcome)

    def response(self, outcomes: Sequence[TaskOutcome[Filled]]) -> ResponseModel:
        choices = [
            CompletionChoice(
                index=index,
                text=found.text,
                finish_reason=found.finish_reason,
                logprobs=None,
                dgemma=self._details(index, outcome),
            )
            for index, outcome in enumerate(outcomes)
            for found in [self.gap.text(outcome)]
        ]
        return self._response(choices, usage=self._usage(outcomes))

    def task_chunks(self, index: int, outcome: TaskOutcome[Filled]) -> Iterator[ResponseModel]:
        found = self.gap.text(outcome)
        if found.text:
            yield self._chunk(index, text=found.text, finish_reason=None)
        details = self._details(index, outcome)
        yield self._chunk(index, text="", finish_reason=found.finish_reason, dgemma=details)

    def usage_chunk(self, outcomes: Sequence[TaskOutcome[Filled]]) -> ResponseModel:
        return self._response([], usage=self._usage(outcomes))

    def _chunk(self, index: int, **choice: Any) -> CompletionResponse:
        usage: dict[str, Any] = {"usage": None} if self.include_usage else {}
        return self._response([CompletionChoice(index=index, **choice)], **usage)

    def _response(self, choices: list[CompletionChoice], **usage: Any) -> CompletionResponse:
        return CompletionResponse(**self.head.fields("text_completion"), choices=choices, **usage)

    def _details(self, index: int, outcome: TaskOutcome[Filled]) -> FillDetails:
        found, result = self.gap.text(outcome), outcome.result
        return FillDetails(
            seed=self.seed + index,
            finish_reason=found.reason,
            log_likelihood=None if result is None else result.log_likelihood,
            candidates=0 if result is None else len(result.candidates),
            denoising_steps=outcome.usage.forwards,
            **set_fields(stop_string=found.stop_string),
        )

    def _usage(self, outcomes: Sequence[TaskOutcome[Filled]]) -> UsageInfo:
        num_tokens = sum(self.gap.text(outcome).num_tokens for outcome in outcomes)
        return task_usage(outcomes, self.gap.prompt_tokens, num_tokens)
