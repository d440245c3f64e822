"""From a checked request to what the engine shall do: one engine request per answer."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from dgemma.canvas.calibration import Calibration
from dgemma.canvas.workbench import Workbench
from dgemma.constraint.compiler import Compiler
from dgemma.constraint.constraint import Constraint
from dgemma.engine.service import EngineRequest, ServedModel
from dgemma.errors import InputError, suggestion
from dgemma.params import MAX_LOGPROBS, GenerationParams
from dgemma.server.api_error import ApiError, api_error_of, named_field, refused, shown
from dgemma.server.chat_form import chat_form
from dgemma.server.chat_request import ChatRequest
from dgemma.server.completion_request import CompletionRequest
from dgemma.server.form_fields import AskedForm, FormFields, text_form
from dgemma.server.request_fields import CommonFields, GenerationFields
from dgemma.server.settings import Settings
from dgemma.server.text import TextService

_MAX_SEED = (1 << 64) - 1
_OPTIONS = tuple(field.name for field in fields(GenerationParams))
# Fields of a request that are passed on under the same name; the others need a look first.
_PASSED_ON = tuple(
    name
    for name in (*_OPTIONS, "preset")
    if name not in ("seed", "max_tokens", "logprobs", "deadline_s", "end_tokens")
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A request, ready for the engine."""

    id: str
    created: int  # Unix seconds
    model: str  # as the caller named it
    fingerprint: str
    prompts: tuple[tuple[int, ...], ...]
    requests: tuple[EngineRequest, ...]  # prompt 0's answers, then prompt 1's, ...
    stream: bool = False
    include_usage: bool = False
    logprobs: int | None = None  # likeliest words to list per token; None: no log-probabilities
    delivers_calls: bool = False  # tools were offered, so calls are an answer
    form: AskedForm | None = None  # to be compiled: what the answers keep to
    limit_name: str = "max_tokens"  # as the caller calls it

    @property
    def num_choices(self) -> int:
        return len(self.requests)

    def within(self, constraint: Constraint) -> Plan:
        """The same with answers that keep to it."""
        requests = tuple(replace(request, constraint=constraint) for request in self.requests)
        return replace(self, requests=requests)

    def refusal(self, error: InputError) -> ApiError:
        """What the engine has refused, in the caller's words."""
        is_limit = named_field(str(error), ("max_tokens",)) is not None
        message = str(error).replace("max_tokens", self.limit_name, 1) if is_limit else str(error)
        return refused(message, self.limit_name if is_limit else None)


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Turns requests into plans. Works on text, which may take a while: call it from a thread."""

    settings: Settings
    served: ServedModel
    text: TextService
    compiler: Compiler
    calibration: Calibration | None = None  # of decisions

    def plan_chat(self, request: ChatRequest) -> Plan:
        adapter = self.adapter_of(request.model)
        tools = request.offered_tools
        try:
            prompt = self.text.render_chat(request.messages, tools=tools, thinking=request.thinking)
        except InputError as error:
            raise refused(str(error), _field_of_chat(str(error), request)) from None
        limit_name = "max_tokens" if request.max_tokens == request.token_limit else "max_completion_tokens"
        return self._plan(
            request,
            prefix="chatcmpl",
            adapter=adapter,
            prompts=[prompt],
            prompt_name="messages",
            limit=request.token_limit,
            limit_name=limit_name,
            logprobs=request.logprobs_wanted,
            delivers_calls=tools is not None,
            form=chat_form(request),
        )

    def plan_completion(self, request: CompletionRequest) -> Plan:
        adapter = self.adapter_of(request.model)
        asked = text_form(request)
        given = request.prompts
        self.check_choices(len(given), request.n)  # before many texts are read for nothing
        try:
            prompts = [
                self.text.encode_prompt(prompt) if isinstance(prompt, str) else tuple(prompt)
                for prompt in given
            ]
        except InputError as error:
            raise refused(f"prompt: {error}", "prompt") from None
        return self._plan(
            request,
            prefix="cmpl",
            adapter=adapter,
            prompts=prompts,
            prompt_name="prompt",
            limit=request.max_tokens,
            limit_name="max_tokens",
            logprobs=request.logprobs,
            delivers_calls=False,
            form=None if asked is None else AskedForm(form=asked[1], field=asked[0]),
        )

    def workbench(self, request: CommonFields, *, id_: str, num_choices: int = 1, seed: int) -> Workbench:
        """What fill, edit and decide work with, as this request wants it."""
        check_seeds(seed, num_choices)
        bench = self.text.workbench(
            self.served,
            params=self.params_of(request),
            seed=seed,
            adapter=self.adapter_of(request.model),
            id_=id_,
        )
        return replace(bench, compiler=self.compiler)

    def deadline_of(self, bench: Workbench) -> float:
        """Seconds for all of the work."""
        asked = bench.params.deadline_s
        return self.settings.request_timeout_s if asked is None else asked

    def _plan(
        self,
        request: FormFields,
        *,
        prefix: str,
        adapter: str | None,
        prompts: Sequence[tuple[int, ...]],
        prompt_name: str,
        limit: int | None,
        limit_name: str,
        logprobs: int | None,
        delivers_calls: bool,
        form: AskedForm | None,
    ) -> Plan:
        check_streaming(request)
        if form is not None:
            _check_ends(request, form)
        num_choices = self.check_choices(len(prompts), request.n)
        for prompt in prompts:
            self._check_prompt(prompt, prompt_name, limit, limit_name)
        params = self.params_of(request, limit, logprobs)
        seed = drawn_seed() if request.seed is None else request.seed
        check_seeds(seed, num_choices)
        id_ = new_id(prefix)
        biases = self._logit_bias(request)
        n = request.n or 1
        return Plan(
            id=id_,
            created=int(time.time()),
            model=request.model,
            fingerprint=self.served.fingerprint,
            prompts=tuple(prompts),
            requests=tuple(
                EngineRequest(
                    id=f"{id_}-{index}",
                    prompt=prompts[index // n],
                    seed=seed + index,
                    params=params,
                    adapter=adapter,
                    drafts=bool(request.diffusing),
                    logit_bias=biases,
                )
                for index in range(num_choices)
            ),
            stream=bool(request.stream),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            logprobs=logprobs,
            delivers_calls=delivers_calls,
            form=form,
            limit_name=limit_name,
        )

    def adapter_of(self, name: str) -> str | None:
        known = (self.settings.served_model_name, *self.served.adapters)
        if name not in known:
            raise unknown_model(name, known)
        return None if name == known[0] else name

    def check_choices(self, num_prompts: int, n: int | None) -> int:
        asked = num_prompts * (n or 1)
        most = self.settings.max_choices
        if asked > most:
            name = "n" if num_prompts == 1 else "prompt"
            raise refused(
                f"{name} asks for {asked} answers; this server writes at most {most} per request.", name
            )
        return asked

    def _check_prompt(
        self, prompt: tuple[int, ...], prompt_name: str, limit: int | None, limit_name: str
    ) -> None:
        served = self.served
        if not prompt:
            raise refused(f"{prompt_name} holds no token; give it some text.", prompt_name)
        wrong = next((token for token in prompt if not 0 <= token < served.vocab_size), None)
        if wrong is not None:
            raise refused(
                f"{prompt_name} holds token {shown(wrong)}; this vocabulary ends at {served.vocab_size - 1}.",
                prompt_name,
            )
        most = self.settings.max_prompt_tokens
        room = served.room_behind(len(prompt))
        if room == 0 or (most is not None and len(prompt) > most):
            rule = (
                f"this model's context of {served.max_positions} then has no room for a canvas of "
                f"{served.canvas_len}"
                if room == 0
                else f"this server takes at most {most}"
            )
            raise too_long(
                f"{prompt_name} has {len(prompt)} tokens; {rule}. Shorten the prompt.", prompt_name
            )
        if limit is not None and limit > room:
            raise too_long(
                f"{limit_name} is {limit}; this model's context leaves {room}. Lower it or shorten the "
                "prompt.",
                limit_name,
            )

    def params_of(
        self, request: CommonFields, limit: int | None = None, logprobs: int | None = None
    ) -> GenerationParams:
        most_s = self.settings.request_timeout_s
        if request.deadline_s is not None and request.deadline_s > most_s:
            raise refused(
                f"deadline_s is {request.deadline_s:g}; this server ends answers after {most_s:g} seconds.",
                "deadline_s",
            )
        options = {name: getattr(request, name, None) for name in _PASSED_ON}
        ends: list[int] | None = getattr(request, "end_tokens", None)
        if ends is not None:
            wrong = [token for token in ends if token >= self.served.vocab_size]
            if wrong:
                raise refused(
                    f"end_tokens holds {wrong[0]}; this vocabulary ends at {self.served.vocab_size - 1}.",
                    "end_tokens",
                )
            options["end_tokens"] = tuple(ends)
        listed = logprobs
        if logprobs is not None:
            # The token of a canvas is the likeliest. A causal one is drawn: look for it among more.
            listed = max(1, logprobs) if options["decode"] in (None, "diffuse") else MAX_LOGPROBS
        try:
            return GenerationParams.make(
                self.served.defaults,
                **options,
                max_tokens=limit,
                logprobs=listed,
                deadline_s=most_s if request.deadline_s is None else request.deadline_s,
            )
        except InputError as error:
            raise api_error_of(error, (*_OPTIONS, "preset")) from None

    def _logit_bias(self, request: GenerationFields) -> tuple[tuple[int, float], ...]:
        biases: dict[int, float] = {}
        for key, bias in (request.logit_bias or {}).items():
            token = int(key) if key.isascii() and key.isdigit() and len(key) < 12 else -1
            if str(token) != key or not 0 <= token < self.served.vocab_size:
                raise refused(
                    f"logit_bias has the key {shown(key)}; keys are token ids from 0 to "
                    f"{self.served.vocab_size - 1}.",
                    "logit_bias",
                )
            biases[token] = float(bias)
        return tuple(sorted(biases.items()))


def unknown_model(name: str, known: Sequence[str]) -> ApiError:
    return ApiError(
        f"model {shown(name)} is not served here{suggestion(name[:200], known)} "
        f"Served: {', '.join(known[:20])}.",
        status=404,
        param="model",
        code="model_not_found",
    )


def drawn_seed() -> int:
    """Short enough to be typed again."""
    return secrets.randbits(32)


def check_seeds(seed: int, num_choices: int) -> None:
    """Answers take seeds in a row; the last one must still be one."""
    if seed + num_choices - 1 > _MAX_SEED:
        raise refused(f"seed is {seed}; that of the last answer would pass {_MAX_SEED}.", "seed")


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def check_streaming(request: GenerationFields) -> None:
    if request.stream:
        return
    for name, value in (("stream_options", request.stream_options), ("diffusing", request.diffusing)):
        if value:
            raise refused(f"{name} is for streams; set stream to true, or leave {name} out.", name)


def _check_ends(request: GenerationFields, form: AskedForm) -> None:
    """What says that a text is whole is the model's own end token."""
    for name, value in (("end_tokens", request.end_tokens), ("ignore_end", request.ignore_end)):
        if value or value == []:
            raise refused(
                f"{name} is {shown(value)}, which is not supported with {form.field}: a text that is whole "
                f"ends with an end token of the model. Leave {name} out.",
                name,
                "unsupported_parameter",
            )


def too_long(message: str, param: str) -> ApiError:
    return refused(message, param, "context_length_exceeded")


def _field_of_chat(message: str, request: ChatRequest) -> str:
    """The field that a sentence of dgemma.text is about."""
    if message.startswith("enable_thinking"):
        return "chat_template_kwargs" if request.reasoning_effort is None else "reasoning_effort"
    return "tools" if message.startswith(("tool ", "tools ")) else "messages"
