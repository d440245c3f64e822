"""The base of the endpoint families' serving classes: checks and conversions that all of them need.

Each family has a subclass (`ChatServing`, `CompletionServing`, ...) that makes a `ServingPlan` of a request.
Works on text, which may take a while: call it from a thread.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from dgemma.engine.request import EngineRequest, canvas_unit, resolve_canvas_len
from dgemma.engine.service import ServedModel
from dgemma.errors import suggestion
from dgemma.events import Answer
from dgemma.images.preprocess import PlacedImage
from dgemma.params import MAX_LOGPROBS, CanvasLen, GenerationParams
from dgemma.server.defaults import without_presets
from dgemma.server.http.errors import ApiError, context_too_long, invalid, shown
from dgemma.server.http.settings import Settings
from dgemma.server.images import NO_IMAGES, LoadedImages
from dgemma.server.pins import canvas_field, requested_pins
from dgemma.server.plan import ResponseWriter, ServingPlan, single_round
from dgemma.server.protocol import CommonFields, ReplyFields
from dgemma.server.response_format import RequestedFormat
from dgemma.server.responses.store import KeptResponses
from dgemma.server.text import TextService
from dgemma.structured_output.compiler import GrammarCompiler
from dgemma.tasks.calibration import Calibration
from dgemma.tasks.context import TaskContext

MAX_SEED = (1 << 64) - 1
# Of the prompts of one request, for all their tokens and answers together.
MAX_PROMPT_LOGPROBS = 1 << 20
# Fields of a request that become generation options under the same name; the others need a check first.
_OPTIONS = (
    *(
        option.name
        for option in fields(GenerationParams)
        if option.name not in ("seed", "max_tokens", "logprobs", "deadline_s", "end_tokens")
    ),
    "preset",
)


@dataclass(frozen=True, kw_only=True)
class ServingContext:
    """What a request is checked against."""

    settings: Settings
    served: ServedModel
    checkpoint_defaults: GenerationParams  # those of `served` are this server's
    thinking: bool  # of a chat that does not say
    text: TextService
    compiler: GrammarCompiler
    calibration: Calibration | None = None  # of decisions
    images: LoadedImages = NO_IMAGES  # of the request
    responses: KeptResponses | None = None  # of the client's API key


@dataclass(frozen=True, kw_only=True)
class ResponseHead:
    """The fields that every response object and chunk begins with."""

    id: str
    created: int  # Unix seconds
    model: str  # as the client named it
    system_fingerprint: str

    def fields(self, object_: str) -> dict[str, Any]:
        return {**vars(self), "object": object_}


@dataclass(frozen=True, kw_only=True)
class GenerationInfo:
    """What the writer of a plain generation needs of its request."""

    head: ResponseHead
    num_choices: int
    num_prompts: int
    prompt_tokens: int  # of all prompts
    include_usage: bool
    logprobs: int | None  # top-k entries to list per token; None: no log-probabilities
    has_tools: bool  # tools were offered, so tool calls are part of the answer


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts of a plain generation and its limit, with the names the client gave them."""

    tokens: Sequence[tuple[int, ...]]
    field: str
    max_tokens: int | None
    max_tokens_field: str
    images: tuple[PlacedImage, ...] = ()  # of the only prompt


class ServingBase:
    """Checks and conversions that all endpoint families need."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context
        self.settings = context.settings
        self.served = context.served
        self.text = context.text

    def head(self, request: CommonFields, prefix: str) -> ResponseHead:
        return ResponseHead(
            id=new_id(prefix),
            created=int(time.time()),
            model=request.model,
            system_fingerprint=self.served.fingerprint,
        )

    def generation_info(
        self,
        request: ReplyFields,
        prompts: Prompts,
        *,
        prefix: str,
        logprobs: int | None,
        has_tools: bool = False,
    ) -> GenerationInfo:
        """Check what does not depend on the response format -> what the writer needs."""
        check_streaming(request)
        num_choices = self.check_choices(len(prompts.tokens), request.answers_per_prompt)
        for tokens in prompts.tokens:
            self._check_prompt(tokens, prompts, request.canvas_len)
        return GenerationInfo(
            head=self.head(request, prefix),
            num_choices=num_choices,
            num_prompts=len(prompts.tokens),
            prompt_tokens=sum(map(len, prompts.tokens)),
            include_usage=request.ends_with_usage,
            logprobs=logprobs,
            has_tools=has_tools,
        )

    def generation_plan(
        self,
        request: ReplyFields,
        prompts: Prompts,
        info: GenerationInfo,
        writer: ResponseWriter[list[Answer]],
        response_format: RequestedFormat | None,
        *,
        num_prompt_logprobs: int | None = None,
    ) -> ServingPlan[list[Answer]]:
        """One round with one engine request per choice: prompt 0's choices, then prompt 1's, ...

        num_prompt_logprobs: also score the prompts, and list so many likely tokens with each of theirs.
        """
        if num_prompt_logprobs is not None:
            _check_prompt_logprobs(prompts, info, num_prompt_logprobs)
        params = self.generation_params(request, prompts.max_tokens or None, info.logprobs)
        canvas_len = resolve_canvas_len(self.served.canvas_len, request.canvas_len)
        pinned = requested_pins(request, self.text, canvas_len)
        if pinned is not None and request.decode is None:
            params = replace(params, decode="diffuse")  # whatever this server's default is
        seed = request_seed(request)
        check_seeds(seed, info.num_choices)
        biases = self._logit_bias(request)
        choices_per_prompt = info.num_choices // info.num_prompts
        requests = [
            EngineRequest(
                id=f"{info.head.id}-{index}",
                prompt=prompts.tokens[index // choices_per_prompt],
                images=prompts.images,
                seed=seed + index,
                params=params,
                adapter=self.adapter(request.model),
                drafts=bool(request.diffusing),
                logit_bias=biases,
                pinned=pinned,
                **_scoring(
                    prompts,
                    index // choices_per_prompt,
                    # A whole response shares what the first answer of a prompt has; a stream cannot wait.
                    num_prompt_logprobs if request.stream or index % choices_per_prompt == 0 else None,
                ),
            )
            for index in range(info.num_choices)
        ]
        assert params.deadline_s is not None
        return ServingPlan(
            model=request.model,
            start=partial(single_round, requests),
            num_choices=info.num_choices,
            writer=writer,
            deadline_s=params.deadline_s,
            answers_are_choices=True,
            prompt_tokens=info.prompt_tokens,
            stream=bool(request.stream),
            include_usage=info.include_usage,
            response_format=response_format,
            field_names={
                "max_tokens": prompts.max_tokens_field,
                "decode": "decode",
                "pins": "pins",
                "canvas": canvas_field(request),
            },
        )

    def task_context(
        self, request: CommonFields, *, id_: str, seed: int, num_choices: int = 1
    ) -> TaskContext:
        """What a task (infill, edit, decide) works with."""
        check_seeds(seed, num_choices)
        context = self.text.task_context(
            self.served,
            params=self.generation_params(request),
            seed=seed,
            adapter=self.adapter(request.model),
            id_=id_,
        )
        return replace(context, compiler=self.context.compiler)

    def deadline_s(self, task: TaskContext) -> float:
        """Seconds for all tasks of a request."""
        deadline_s = task.params.deadline_s
        return self.settings.request_timeout_s if deadline_s is None else deadline_s

    def adapter(self, model: str) -> str | None:
        """The served adapter that `model` names; None: the base model."""
        known = (self.settings.served_model_name, *self.served.adapters)
        if model not in known:
            raise unknown_model(model, known)
        return None if model == known[0] else model

    def check_choices(self, num_prompts: int, n: int | None) -> int:
        """The number of choices of a request, within the server's limit."""
        num_choices = num_prompts * (n or 1)
        most = self.settings.max_choices
        if num_choices > most:
            name = "n" if num_prompts == 1 else "prompt"
            raise invalid(
                f"{name} asks for {num_choices} answers; this server writes at most {most} per request.", name
            )
        return num_choices

    def check_vocabulary(self, tokens: Sequence[int], field: str) -> None:
        """Refuse ids that the model does not have."""
        wrong = next((token for token in tokens if not 0 <= token < self.served.vocab_size), None)
        if wrong is not None:
            raise invalid(
                f"{field} holds token {shown(wrong)}; this vocabulary ends at {self.served.vocab_size - 1}.",
                field,
            )

    def _check_prompt(self, prompt: tuple[int, ...], prompts: Prompts, canvas_len: CanvasLen | None) -> None:
        served, field, limit = self.served, prompts.field, prompts.max_tokens
        if not prompt:
            raise invalid(f"{field} holds no token; give it some text.", field)
        self.check_vocabulary(prompt, field)
        most = self.settings.max_prompt_tokens
        most_new = served.max_new_tokens(len(prompt), canvas_len)
        if limit == 0 and len(prompt) <= served.max_positions:
            most_new = 1  # nothing is written, so it may fill the context
        if most_new == 0 or (most is not None and len(prompt) > most):
            rule = (
                f"this model's context of {served.max_positions} then has no room for a canvas of "
                f"{canvas_unit(served.canvas_len, canvas_len)}"
                if most_new == 0
                else f"this server takes at most {most}"
            )
            raise context_too_long(f"{field} has {len(prompt)} tokens; {rule}. Shorten the prompt.", field)
        if limit is not None and limit > most_new:
            raise context_too_long(
                f"{prompts.max_tokens_field} is {limit}; this model's context leaves {most_new}. Lower it "
                "or shorten the prompt.",
                prompts.max_tokens_field,
            )

    def generation_params(
        self, request: CommonFields, max_tokens: int | None = None, logprobs: int | None = None
    ) -> GenerationParams:
        most_s = self.settings.request_timeout_s
        if request.deadline_s is not None and request.deadline_s > most_s:
            raise invalid(
                f"deadline_s is {request.deadline_s:g}; this server ends answers after {most_s:g} seconds.",
                "deadline_s",
            )
        options = {name: getattr(request, name, None) for name in _OPTIONS}
        ends: list[int] | None = getattr(request, "end_tokens", None)
        if ends is not None:
            wrong = [token for token in ends if token >= self.served.vocab_size]
            if wrong:
                raise invalid(
                    f"end_tokens holds {wrong[0]}; this vocabulary ends at {self.served.vocab_size - 1}.",
                    "end_tokens",
                )
            options["end_tokens"] = tuple(ends)
        defaults = self.served.defaults
        if options["preset"] is not None:
            defaults = without_presets(defaults, self.context.checkpoint_defaults)
        top_k = logprobs
        if logprobs is not None:
            # The token of a canvas is its argmax. A causal token is sampled: search it in a longer list.
            is_canvas = (options["decode"] or defaults.decode) == "diffuse"
            top_k = max(1, logprobs) if is_canvas else MAX_LOGPROBS
        return GenerationParams.make(
            defaults,
            **options,
            max_tokens=max_tokens,
            logprobs=top_k,
            deadline_s=most_s if request.deadline_s is None else request.deadline_s,
        )

    def _logit_bias(self, request: ReplyFields) -> tuple[tuple[int, float], ...]:
        biases: dict[int, float] = {}
        for key, bias in (request.logit_bias or {}).items():
            token = int(key) if key.isascii() and key.isdigit() and len(key) < 12 else -1
            if str(token) != key or not 0 <= token < self.served.vocab_size:
                raise invalid(
                    f"logit_bias has the key {shown(key)}; keys are token ids from 0 to "
                    f"{self.served.vocab_size - 1}.",
                    "logit_bias",
                )
            biases[token] = float(bias)
        return tuple(sorted(biases.items()))


def _check_prompt_logprobs(prompts: Prompts, info: GenerationInfo, num_listed: int) -> None:
    """Bound the numbers of a response."""
    size = (num_listed + 1) * info.prompt_tokens * (info.num_choices // info.num_prompts)
    if size > MAX_PROMPT_LOGPROBS:
        raise invalid(
            f"{prompts.field} has {info.prompt_tokens} tokens, for which {size} log-probabilities are asked "
            f"for; at most {MAX_PROMPT_LOGPROBS} are returned. Shorten it, or ask for fewer tokens of each.",
            prompts.field,
        )


def _scoring(prompts: Prompts, number: int, num_listed: int | None) -> dict[str, Any]:
    """How a request scores its prompt; with a limit of 0 tokens it does nothing else."""
    found: dict[str, Any] = {"prompt_logprobs": num_listed}
    if prompts.max_tokens == 0:
        found["score_from"] = len(prompts.tokens[number]) if num_listed is None else 1
    return found


def unknown_model(name: str, known: Sequence[str]) -> ApiError:
    return ApiError(
        f"model {shown(name)} is not served here{suggestion(name[:200], known)} "
        f"Served: {', '.join(known[:20])}.",
        status=404,
        param="model",
        code="model_not_found",
    )


def request_seed(request: CommonFields) -> int:
    """The request's seed, or a random one that is short enough to be typed again."""
    return secrets.randbits(32) if request.seed is None else request.seed


def check_seeds(seed: int, num_choices: int) -> None:
    """Choices take consecutive seeds; the last one must be valid too."""
    if seed + num_choices - 1 > MAX_SEED:
        raise invalid(f"seed is {seed}; that of the last answer would pass {MAX_SEED}.", "seed")


def new_id(prefix: str) -> str:
    """A prefix that ends with an underscore is kept as it is: OpenAI's and Anthropic's newer ids have one."""
    return f"{prefix}{'' if prefix.endswith('_') else '-'}{uuid.uuid4().hex}"


def check_streaming(request: ReplyFields) -> None:
    if request.stream:
        return
    for name in ("stream_options", "diffusing"):
        if getattr(request, name, None):
            raise invalid(f"{name} is for streams; set stream to true, or leave {name} out.", name)


def check_prompt_logprobs(request: ReplyFields) -> None:
    """They are returned with a whole answer, as in vLLM."""
    if request.stream and getattr(request, "prompt_logprobs", None) is not None:
        raise invalid(
            "prompt_logprobs is not returned in a stream; leave stream out, or have echo and logprobs of a "
            "completion.",
            "prompt_logprobs",
        )


def check_end_tokens(request: ReplyFields, response_format: RequestedFormat | None) -> None:
    """A constrained text ends with the model's own end token."""
    if response_format is None:
        return
    for name, value in (("end_tokens", request.end_tokens), ("ignore_end", request.ignore_end)):
        if value or value == []:
            raise invalid(
                f"{name} is {shown(value)}, which is not supported with {response_format.field}: a text that "
                f"is whole ends with an end token of the model. Leave {name} out.",
                name,
                "unsupported_parameter",
            )
