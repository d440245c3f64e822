"""`LanguageModel`: a loaded model with generate, stream, chat, fill, edit, decide and extract."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, Unpack, overload

from dgemma.checkpoint.source import CheckpointSource
from dgemma.engine.local import LocalEngine
from dgemma.engine.request import (
    EngineRequest,
    PinnedTokens,
    read_prompts,
    resolve_canvas_len,
    seeds_for,
)
from dgemma.errors import InputError
from dgemma.events import Answer, Event, Finish
from dgemma.forms.extraction import (
    Extraction,
    extraction_request,
    read_extraction,
)
from dgemma.images.prompt import ImagePrompt, read_message_images, text_only
from dgemma.loaded_model import LoadedModel
from dgemma.machine import inspect_machine, package_versions
from dgemma.model.lora import has_adapter
from dgemma.model.transformer import Transformer
from dgemma.params import GenerateOptions, GenerationParams, InfillOptions, SamplingOptions
from dgemma.sampling.sampler import Sampler
from dgemma.structured_output.compiler import GrammarCompiler
from dgemma.structured_output.response_format import ResponseFormat, pop_response_format, tool_call_format
from dgemma.tasks.calibration import Calibration
from dgemma.tasks.context import TaskContext
from dgemma.tasks.decide import Decision, Question, decide
from dgemma.tasks.edit import Edited, EditOptions, edit
from dgemma.tasks.infill import Filled, FillOptions, fill
from dgemma.tasks.pins import pinned_tokens
from dgemma.tasks.rounds import drive
from dgemma.text.token_texts import TokenTexts
from dgemma.trace.recorder import Recorder
from dgemma.trace.replay import replay
from dgemma.trace.trace import Trace

if TYPE_CHECKING:
    from PIL.Image import Image

    from dgemma.images.decode import RgbImage

ImageSource: TypeAlias = "RgbImage | Image | bytes | Path | str"
"""An image that a caller gives: a path, the bytes of a file, or an image of Pillow."""


class GenerateArguments(GenerateOptions, total=False):
    """Keyword arguments of `LanguageModel.generate`, which explains them."""

    seeds: Sequence[int] | None
    preset: str | None
    sampler: Sampler | None
    images: Sequence[ImageSource]
    max_image_tokens: int | None


class LanguageModel(LoadedModel):
    """A model ready to run. Make one with `dgemma.load`.

    >>> lm.generate("The sea is", max_tokens=100, seed=1).text
    >>> lm.chat([{"role": "user", "content": "Why is the sea salty?"}]).text

    The two passes of the model:

    >>> lm = dgemma.load("path/to/checkpoint", dtype="float32")
    >>> cache = lm.new_cache(batch=1)
    >>> lm.encode(torch.tensor([[2, 17, 5]]), cache)       # the prompt, causal
    >>> canvas = torch.randint(lm.config.vocab_size, (1, lm.config.canvas_len))
    >>> hidden = lm.denoise(canvas, cache)                 # one refinement step
    >>> logits = lm.logits(hidden)
    >>> hidden = lm.denoise(canvas, cache, soft=lm.soft_embedding(logits))

    Parameters do not require gradients after loading; switch them on and gradients flow through
    both passes. Call them under `torch.inference_mode()` when you need none.
    """

    def __init__(self, transformer: Transformer, source: CheckpointSource | None = None) -> None:
        super().__init__(transformer, source)
        self._engine: LocalEngine | None = None
        self._compilers: dict[tuple[int, ...], GrammarCompiler] = {}  # by end tokens
        self._recorder: Recorder | None = None

    def with_transformer(self, transformer: Transformer) -> Self:
        """The same files and tokenizer with another transformer."""
        other = super().with_transformer(transformer)
        other._engine = None  # a KV cache computed in another way is another cache
        other._recorder = None
        return other

    def follow(self) -> None:
        """On a rank that is not the first: take part in whatever that is asked, until it ends."""
        self._local_engine.follow()

    def _with_images(
        self, prompt: tuple[int, ...], images: Sequence[ImageSource], budget: int | None
    ) -> ImagePrompt:
        if not isinstance(images, Sequence) or isinstance(images, str | bytes):
            raise InputError.about("images", f"is a {images.__class__.__name__}; give a list of images.")
        if not images:
            return ImagePrompt(prompt)
        if self.images is None:
            raise text_only("images", "are given")
        bos = self.tokenizer.bos_id if self.has_tokenizer else None
        return self.images.prompt(prompt, images, budget=budget, bos=bos)

    # Generation

    # A str is a Sequence[str] of characters to a type checker; the first overload wins.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompt: str, **options: Unpack[GenerateArguments]
    ) -> Answer: ...
    @overload
    def generate(self, prompt: Sequence[str], **options: Unpack[GenerateArguments]) -> list[Answer]: ...
    @overload
    def generate(self, prompt: Sequence[int], **options: Unpack[GenerateArguments]) -> Answer: ...
    @overload
    def generate(
        self, prompt: Sequence[Sequence[int]], **options: Unpack[GenerateArguments]
    ) -> list[Answer]: ...

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        seeds: Sequence[int] | None = None,
        preset: str | None = None,
        sampler: Sampler | None = None,
        images: Sequence[ImageSource] = (),
        max_image_tokens: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Answer | list[Answer]:
        """Continue a text, or a list of texts in one batch. Token ids are taken as they are.

        images: of one prompt. They come first, or where token ids have an image token for each.
        max_image_tokens: for each image, 70 to 1120, in place of the checkpoint's budget.
        seeds: one per prompt of a list; with `seed=n` alone, prompt i takes n + i.
        preset: "fast", "balanced" or "thorough". sampler: your own, in place of the options'.
        options: the fields of `dgemma.GenerationParams`, and one response format: `regex`, `choice` (a list
        of texts), `json_schema` (a mapping or JSON text), `json_object=True`.
        pins: given tokens of the answer (`dgemma.Pin`), or a mapping from position to token, or to several
        allowed ones. canvas: what its canvases start from (`dgemma.StartingCanvas`), or a text.
        """
        prompts, is_list = read_prompts(prompt, self._text_ids)
        if images and len(prompts) > 1:
            raise InputError.about("images", f"are given with {len(prompts)} prompts; give them with one.")
        placed = [self._with_images(prompt, images, max_image_tokens) for prompt in prompts]
        events = self._run(placed, seeds, preset, sampler, dict(options), drafts=False)
        answers = {e.row: e.answer for e in events if isinstance(e, Finish)}
        return [answers[row] for row in range(len(prompts))] if is_list else answers[0]

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        drafts: bool = True,
        preset: str | None = None,
        sampler: Sampler | None = None,
        images: Sequence[ImageSource] = (),
        max_image_tokens: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[Event]:
        """Like `generate` for one prompt: `Draft` per step, `Commit` per canvas, `Finish` at the end."""
        prompts, is_list = read_prompts(prompt, self._text_ids)
        if is_list:
            raise InputError("prompt is a list of prompts; stream takes one. Use generate for a batch.")
        placed = [self._with_images(prompts[0], images, max_image_tokens)]
        return self._run(placed, None, preset, sampler, dict(options), drafts=drafts)

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Literal["auto", "required"] = "auto",
        thinking: bool = False,
        preset: str | None = None,
        sampler: Sampler | None = None,
        max_image_tokens: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Answer:
        """Answer a conversation through the checkpoint's chat template.

        >>> parts = [{"type": "image", "image": "photo.jpg"}, {"type": "text", "text": "What is this?"}]
        >>> lm.chat([{"role": "user", "content": parts}]).text

        An image is a path, the bytes of a file, or an image of Pillow.
        max_image_tokens: for each image, 70 to 1120, in place of the checkpoint's budget.

        Give the whole conversation at each turn; the prefix cache keeps what earlier turns computed.
        A thought may come before an answer constrained by `regex`, `choice`, `json_schema` or `json_object`.
        Arguments of `strict` tools are valid for their schema; tool_choice: "required" leaves only calls.
        """
        events = self.stream_chat(
            messages,
            tools=tools,
            tool_choice=tool_choice,
            thinking=thinking,
            drafts=False,
            preset=preset,
            sampler=sampler,
            max_image_tokens=max_image_tokens,
            **options,
        )
        return next(event.answer for event in events if isinstance(event, Finish))

    def stream_chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Literal["auto", "required"] = "auto",
        thinking: bool = False,
        drafts: bool = True,
        preset: str | None = None,
        sampler: Sampler | None = None,
        max_image_tokens: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[Event]:
        """Like `chat`, as a stream of events."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        prompt = self.chat_template.render_with_images(
            read_message_images(messages),
            prepare=None if self.images is None else partial(self.images.patches, budget=max_image_tokens),
            tools=tools,
            enable_thinking=thinking,
        )
        wanted: dict[str, Any] = dict(options)
        response_format = pop_response_format(wanted)
        if tool_choice not in ("auto", "required"):
            raise InputError.about("tool_choice", f"is {tool_choice!r}; it must be auto or required.")
        calls = tool_call_format(tools or (), required=tool_choice == "required", text_format=response_format)
        run = partial(self._run, [prompt], None, preset, sampler, wanted, drafts=drafts)
        return run(thinks=thinking, response_format=calls or response_format)

    # Traces

    @contextmanager
    def record(self, command: str = "") -> Iterator[Recorder]:
        """Record every step of what this model generates within, by whichever method.

        >>> with lm.record() as recorder:
        ...     lm.fill("The sea is ", " because of the salt.")
        >>> recorder.trace().save("fill.trace")
        """
        if self._recorder is not None:
            raise InputError("this model is being recorded already; end that first.")
        self._recorder = self._new_recorder(command)
        try:
            yield self._recorder
        finally:
            self._recorder = None

    def replay(self, trace: Trace) -> Trace:
        """Run the requests of a trace again -> their trace, to be compared with it (`trace.compare`)."""
        return replay(
            trace, self._new_recorder("replay"), self._local_engine.run, self._compiler, self.config
        )

    def _new_recorder(self, command: str) -> Recorder:
        versions = package_versions()
        about = {
            "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": command,
            "model": {
                "name": None if self._source is None else self._source.path.name,
                "weights": self.fingerprint()[:16],
                "has_adapter": has_adapter(self.transformer),
                "tokenizer": self.tokenizer.fingerprint if self.has_tokenizer else None,
                "dtype": str(self.transformer.embedding.dtype).removeprefix("torch."),
                "device": str(self.device),
                "exact": self.transformer.execution.exact,
                "canvas_len": self.config.canvas_len,
                "vocab_size": self.config.vocab_size,
            },
            "versions": {name: versions[name] for name in ("dgemma", "torch")},
            "processor": inspect_machine().processor,
        }
        return Recorder(about, self._token_text if self.has_tokenizer else lambda token: f"<{token}>")

    def _token_text(self, token: int) -> str:
        return self.tokenizer.decode([token], controls=True)

    # Infill, edit, decide

    def fill(
        self,
        prefix: str,
        suffix: str,
        *,
        max_tokens: int = 40,
        lengths: Sequence[int] | None = None,
        keep: int = 4,
        drafts: int = 8,
        heal: bool = True,
        method: Literal["lengths", "prompt"] = "lengths",
        preset: str | None = None,
        **options: Unpack[InfillOptions],
    ) -> Filled:
        """The text that belongs between `prefix` and `suffix`, of at most `max_tokens` tokens.

        lengths: of the gap in tokens, to be tried; keep: how many of them go on after one step.
        drafts: number of texts written left to right after the prefix, whose beginnings are tried too.
        heal: allow tokens that span the borders of the gap (token healing).
        method: "prompt" asks through the chat template instead of trying lengths.
        options: sampling options, and a response format: `regex`, `choice`, `json_schema` or `json_object`.
        """
        sampling: dict[str, Any] = dict(options)
        response_format = pop_response_format(sampling)
        wanted = FillOptions(
            max_tokens=max_tokens,
            lengths=tuple(lengths) if isinstance(lengths, Sequence) else lengths,
            keep=keep,
            drafts=drafts,
            heal=heal,
            method=method,
            form=response_format,
        )
        return drive(fill(self._task_context(preset, **sampling), prefix, suffix, wanted), self._ask)

    def edit(
        self,
        text: str,
        instruction: str = "",
        *,
        before: str = "",
        after: str = "",
        windows: int = 3,
        preset: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Edited:
        """`text` with the tokens changed that the model, under `instruction`, finds unlikely.

        before, after: surrounding texts, which stay.
        windows: maximum number of places to examine per canvas of text.
        """
        context = self._task_context(preset, **options)
        wanted = EditOptions(windows=windows)
        return drive(edit(context, text, instruction, wanted, before=before, after=after), self._ask)

    def decide(
        self,
        input: str | Sequence[Mapping[str, Any]],  # noqa: A002
        questions: Sequence[Question],
        *,
        steps: int = 1,
        draws: int = 4,
        calibration: Calibration | None = None,
        preset: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> tuple[Decision, ...]:
        """How likely each choice of each question is, given a text or a conversation.

        draws: canvases of noise whose probabilities are averaged. steps: denoise steps before slots are read;
        more let questions agree with each other. calibration: fitted with `dgemma decide --fit`.
        """
        context = self._task_context(preset, **options)
        rounds = decide(context, input, questions, steps=steps, draws=draws, calibration=calibration)
        return drive(rounds, self._ask).decisions

    def extract(
        self,
        message: str,
        type: str | None = None,  # noqa: A002
        *,
        json_schema: Mapping[str, Any] | None = None,
        today: datetime.date | None = None,
        preset: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Extraction:
        """A short message as a record, for instance an appointment out of a mail.

        type: one of `record_types`; json_schema: of your own; neither: the model finds the type. today: what
        "tomorrow" refers to (default: today). The record always is valid for its schema.
        """
        if not isinstance(json_schema, Mapping | None):
            raise InputError.about("json_schema", f"is a {json_schema.__class__.__name__}; give a mapping.")
        request = extraction_request(
            message,
            type,
            None if json_schema is None else dict(json_schema),
            today=today or datetime.date.today(),
            trained=self.record_types,
        )
        answer = self.chat(request.prompt, preset=preset, json_schema=request.schema, **options)
        return read_extraction(request, answer)

    def _task_context(self, preset: str | None = None, **options: Any) -> TaskContext:
        """What fill, edit and decide need of this model."""
        params = GenerationParams.make(self.generation_defaults, preset=preset, **options)
        if params.deadline_s is not None:
            raise InputError("deadline_s does not apply to fill, edit and decide; lower max_tokens instead.")
        return TaskContext(
            tokenizer=self.tokenizer,
            token_texts=self._token_texts,
            canvas_len=resolve_canvas_len(self.config.canvas_len, params.canvas_len),
            max_positions=self.config.max_positions,
            vocab_size=self.config.vocab_size,
            params=params,
            seed=seeds_for(1, None, params)[0],
            template=self.chat_template if self.has_chat_template else None,
            compiler=self._compiler(params),
        )

    def _compiler(self, params: GenerationParams) -> GrammarCompiler:
        if params.end_tokens not in self._compilers:
            vocab_size = self.config.vocab_size
            self._compilers[params.end_tokens] = GrammarCompiler(
                self.tokenizer, vocab_size, params.end_tokens
            )
        return self._compilers[params.end_tokens]

    @cached_property
    def _token_texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)

    def _ask(self, requests: Sequence[EngineRequest]) -> list[Answer]:
        """All of them in one batch."""
        numbered = [replace(request, row=row) for row, request in enumerate(requests)]
        events = self._submit(numbered)
        answers = {event.row: event.answer for event in events if isinstance(event, Finish)}
        return [answers[row] for row in range(len(requests))]

    def _run(
        self,
        prompts: Sequence[ImagePrompt],
        seeds: Sequence[int] | None,
        preset: str | None,
        sampler: Sampler | None,
        options: dict[str, Any],
        *,
        drafts: bool,
        thinks: bool = False,
        response_format: ResponseFormat | None = None,
    ) -> Iterator[Event]:
        pinned = self._pinned(options.pop("pins", None), options.pop("canvas", None))
        response_format = response_format or pop_response_format(options)
        params = GenerationParams.make(self.generation_defaults, preset=preset, **options)
        constraint = (
            None
            if response_format is None
            else self._compiler(params).compile(response_format, allow_thought=thinks)
        )
        if params.stop:
            self.tokenizer  # noqa: B018  (without one there is no text to stop at: say so)
        requests = [
            EngineRequest(
                prompt=prompt.tokens,
                images=prompt.images,
                seed=seed,
                params=params,
                row=row,
                sampler=sampler,
                drafts=drafts,
                pinned=pinned,
                constraint=constraint,
            )
            for row, (prompt, seed) in enumerate(
                zip(prompts, seeds_for(len(prompts), seeds, params), strict=True)
            )
        ]
        return self._submit(requests)

    def _pinned(self, pins: Any, canvas: Any) -> PinnedTokens | None:
        # A model without a tokenizer takes pins of ids.
        return pinned_tokens(
            pins, canvas, lambda text: self.tokenizer.encode(text), lambda id_: self.tokenizer.bytes_of(id_)
        )

    def _submit(self, requests: Sequence[EngineRequest]) -> Iterator[Event]:
        engine, recorder = self._local_engine, self._recorder
        return engine.run(requests) if recorder is None else recorder.run(requests, engine.run)

    @property
    def _local_engine(self) -> LocalEngine:
        if self._engine is None:
            self._engine = LocalEngine(self.transformer, self.tokenizer if self.has_tokenizer else None)
        return self._engine

    def _text_ids(self, text: str) -> tuple[int, ...]:
        bos = self.tokenizer.bos_id
        return (*(() if bos is None else (bos,)), *self.tokenizer.encode(text))
