"""The handle a user holds: a loaded model, its two doors, and generation."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, overload

from dgemma.canvas.calibration import Calibration
from dgemma.canvas.decide import Decision, Question, decide
from dgemma.canvas.edit import Edited, EditOptions, edit
from dgemma.canvas.fill import Filled, FillOptions, fill
from dgemma.canvas.rounds import drive
from dgemma.canvas.workbench import Workbench
from dgemma.checkpoint.adapter import load_adapter, save_adapter
from dgemma.checkpoint.adapter_source import open_adapter
from dgemma.checkpoint.device import check_device, check_dtype
from dgemma.checkpoint.fingerprint import fingerprint
from dgemma.checkpoint.hub import resolve
from dgemma.checkpoint.load import Progress, load_stack
from dgemma.checkpoint.save import save
from dgemma.checkpoint.source import CheckpointSource, open_checkpoint, read_json
from dgemma.constraint.compiler import Compiler
from dgemma.constraint.forms import Form, calls_of, take_form
from dgemma.diffusion.step import Sampler
from dgemma.engine.local import LocalEngine
from dgemma.engine.service import EngineRequest
from dgemma.errors import CheckpointError, InputError
from dgemma.events import Answer, Event, Finish
from dgemma.generation.job import check_prompt, read_prompts, seeds_for
from dgemma.generation.parts import compile_ahead
from dgemma.given import Given
from dgemma.model.doors import Doors
from dgemma.model.execution import default_execution
from dgemma.model.lora import LoraSettings, attach, detach, has_adapter, merged
from dgemma.model.stack import Stack
from dgemma.params import GenerationParams
from dgemma.text.chat_template import ChatTemplate
from dgemma.text.detokenizer import Detokenizer
from dgemma.text.piece_table import PieceTable
from dgemma.text.tokenizer import Tokenizer


def load(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    exact: bool = False,
    compile: bool = False,  # noqa: A002
    revision: str | None = None,
    adapter: str | Path | None = None,
    round_activations: bool = True,
    progress: Progress | None = None,
) -> LanguageModel:
    """Load a checkpoint in the released layout: a directory, or a hub name such as "owner/name".

    The doors need no tokenizer files; whatever takes or gives text does.

    dtype: "float32", "bfloat16", or "auto" for the one config.json names.
    device: "cpu", "cuda", "cuda:1", "mps".
    exact: run so that a row's bits never depend on what shares its batch (slower).
    compile: fuse the vocabulary end into one kernel; loading then takes seconds more.
    revision: branch, tag or commit of a hub name.
    adapter: directory of a LoRA adapter for this base, dgemma's or PEFT's.
    round_activations: where a model is quantized and products on its codes are faster (dgemma doctor says),
      round what they multiply to eight bits, a scale to each 256 neighbours. False: decode each weight.
    progress: called with (bytes read, bytes in all) after each tensor.
    """
    target = check_device(device)
    source = open_checkpoint(resolve(path, revision=revision))
    number_type = check_dtype(dtype, source)
    if adapter is not None:
        open_adapter(adapter, source.config)  # refuse a wrong one before a large base is read for nothing
    execution = replace(default_execution(target, number_type, exact=exact), fused_vocabulary=compile)
    stack = load_stack(
        source,
        dtype=number_type,
        device=target,
        execution=execution,
        round_activations=round_activations,
        progress=progress,
    )
    lm = LanguageModel(stack, source)
    if adapter is not None:
        lm = lm.with_adapter(adapter)
    if compile:
        compile_ahead(lm.stack)
    return lm


class LanguageModel(Doors):
    """A model ready to run. Make one with `dgemma.load`.

    >>> lm.generate("The sea is", max_tokens=100, seed=1).text
    >>> lm.chat([{"role": "user", "content": "Why is the sea salty?"}]).text

    The two doors behind it:

    >>> lm = dgemma.load("path/to/checkpoint", dtype="float32")
    >>> cache = lm.new_cache(batch=1)
    >>> lm.encode(torch.tensor([[2, 17, 5]]), cache)       # the prompt, causal
    >>> canvas = torch.randint(lm.config.vocab_size, (1, lm.config.canvas_len))
    >>> hidden = lm.denoise(canvas, cache)                 # one refinement step
    >>> logits = lm.logits(hidden)
    >>> hidden = lm.denoise(canvas, cache, soft=lm.soft_embedding(logits))

    Parameters do not require gradients after loading; switch them on and gradients flow through
    both doors. Call the doors under `torch.inference_mode()` when you need none.
    """

    def __init__(self, stack: Stack, source: CheckpointSource | None = None) -> None:
        super().__init__(stack)
        self._source = source
        self._engine: LocalEngine | None = None
        self._compilers: dict[tuple[int, ...], Compiler] = {}  # by end tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in memory, an adapter's included."""
        return sum(tensor.nbytes for tensor in chain(self.stack.parameters(), self.stack.buffers()))

    def exact(self, exact: bool = True) -> LanguageModel:
        """The same weights, run so that a row's bits never depend on what shares its batch."""
        return self.with_stack(self.stack.with_execution(replace(self.stack.execution, exact=exact)))

    def with_stack(self, stack: Stack) -> LanguageModel:
        """The same files and text behind another stack."""
        twin = copy.copy(self)
        twin.stack = stack
        twin._engine = None  # a context computed in another way is another context
        return twin

    # Adapters

    def with_adapter(self, adapter: str | Path | LoraSettings, *, seed: int = 0) -> LanguageModel:
        """This model with a LoRA adapter: one from a directory, or a fresh one to be trained.

        The base's weights are shared, and this handle stays without: one base carries many adapters at
        once. A fresh adapter's factors come from `seed` and require gradients; loaded ones do not.
        """
        if has_adapter(self.stack):
            raise InputError("this model has an adapter already; call without_adapter() first.")
        if isinstance(adapter, LoraSettings):
            return self.with_stack(attach(self.stack, adapter, seed=seed))
        source = open_adapter(adapter, self.config)
        made_from = None if self._source is None else self._source.quantized_from
        return self.with_stack(
            load_adapter(
                self.stack, source, base_fingerprint=fingerprint(self.stack), quantized_from=made_from
            )
        )

    def without_adapter(self) -> LanguageModel:
        """The base alone, over the same weights."""
        return self.with_stack(detach(self.stack))

    def merged(self) -> LanguageModel:
        """The adapter added into new weights, as fast as the base; this handle stays as it is."""
        return self.with_stack(merged(self.stack))

    def fingerprint(self) -> str:
        """A short name for the base's weights, the same in fp32 and bf16; an adapter does not change it."""
        return fingerprint(self.stack)

    def save_adapter(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the adapter alone, in the layout that PEFT reads, for this base."""
        base_name = None if self._source is None else str(self._source.path)
        save_adapter(
            self.stack,
            path,
            base_fingerprint=fingerprint(self.stack),
            base_name=base_name,
            overwrite=overwrite,
        )

    # Text

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return Tokenizer.from_directory(self._directory)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The checkpoint's chat template."""
        return ChatTemplate.from_directory(self._directory, self.tokenizer)

    @property
    def has_chat_template(self) -> bool:
        try:
            return self.chat_template is not None
        except CheckpointError:
            return False

    @cached_property
    def generation_defaults(self) -> GenerationParams:
        """The checkpoint's generation_config.json, or the reference's defaults where it has none."""
        file = None if self._source is None else self._source.path / "generation_config.json"
        if file is None or not file.is_file():
            return GenerationParams()
        try:
            return GenerationParams.from_generation_config(read_json(file))
        except InputError as error:
            raise CheckpointError(f"{file}: {error}") from None

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The text each token adds; a token that ends within a character adds none."""
        detokenizer = Detokenizer(self.tokenizer)
        pieces = [detokenizer.add([token]) for token in tokens]
        if pieces:
            pieces[-1] += detokenizer.finish()
        return pieces

    # Generation

    @overload
    def generate(self, prompt: str, **options: Any) -> Answer: ...
    @overload
    def generate(self, prompt: Sequence[str], **options: Any) -> list[Answer]: ...
    @overload
    def generate(self, prompt: Sequence[int], **options: Any) -> Answer: ...
    @overload
    def generate(self, prompt: Sequence[Sequence[int]], **options: Any) -> list[Answer]: ...

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        seeds: Sequence[int] | None = None,
        preset: str | None = None,
        sampler: Sampler | None = None,
        pins: Mapping[int, int | Sequence[int]] | None = None,
        **options: Any,
    ) -> Answer | list[Answer]:
        """Continue a text, or a list of texts in one batch. Token ids are taken as they are.

        seeds: one per prompt of a list; with `seed=n` alone, prompt i takes n + i.
        preset: "fast", "balanced" or "thorough". sampler: your own, in place of the options'.
        pins: by position of the answer, a token that stands there, or several one of which does.
        options: the fields of `dgemma.GenerationParams`, and one of what the text shall be: `regex`, `choice`
        (a list of texts), `json_schema` (a mapping or JSON text), `json_object=True`.
        """
        prompts, is_list = read_prompts(prompt, self._text_ids)
        events = self._run(prompts, seeds, preset, sampler, options, drafts=False, pins=pins)
        answers = {e.row: e.answer for e in events if isinstance(e, Finish)}
        return [answers[row] for row in range(len(prompts))] if is_list else answers[0]

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        drafts: bool = True,
        preset: str | None = None,
        sampler: Sampler | None = None,
        pins: Mapping[int, int | Sequence[int]] | None = None,
        **options: Any,
    ) -> Iterator[Event]:
        """Like `generate` for one prompt: `Draft` per step, `Commit` per canvas, `Finish` at the end."""
        prompts, is_list = read_prompts(prompt, self._text_ids)
        if is_list:
            raise InputError("prompt is a list of prompts; stream takes one. Use generate for a batch.")
        return self._run(prompts, None, preset, sampler, options, drafts=drafts, pins=pins)

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Literal["auto", "required"] = "auto",
        thinking: bool = False,
        preset: str | None = None,
        sampler: Sampler | None = None,
        **options: Any,
    ) -> Answer:
        """Answer a conversation through the checkpoint's chat template.

        Give the whole conversation at each turn; what earlier turns already read is not read again.
        A thought comes before what `regex`, `choice`, `json_schema` or `json_object` ask the answer to be.
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
        **options: Any,
    ) -> Iterator[Event]:
        """Like `chat`, as a stream of events."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        prompt = self.chat_template.render(messages, tools=tools, enable_thinking=thinking)
        form = take_form(options)
        if tool_choice not in ("auto", "required"):
            raise InputError(f"tool_choice is {tool_choice!r}; it must be auto or required.")
        calls = calls_of(tools or (), required=tool_choice == "required", instead=form)
        run = partial(self._run, [tuple(prompt)], None, preset, sampler, options, drafts=drafts)
        return run(thinks=thinking, form=calls or form)

    # What only a canvas can do

    def fill(
        self,
        prefix: str,
        suffix: str,
        *,
        max_tokens: int = 40,
        lengths: Sequence[int] | None = None,
        keep: int = 4,
        heal: bool = True,
        method: Literal["lengths", "prompt"] = "lengths",
        preset: str | None = None,
        **options: Any,
    ) -> Filled:
        """The text that belongs between `prefix` and `suffix`, of at most `max_tokens` tokens.

        lengths: of the gap in tokens, to be tried; keep: how many of them go on after one step.
        heal: let words of the vocabulary stand across the borders.
        method: "prompt" asks through the chat template instead of trying lengths.
        options: also `regex`, `choice`, `json_schema` or `json_object`, which the text is to be.
        """
        form = take_form(options)
        wanted = FillOptions(
            max_tokens=max_tokens,
            lengths=tuple(lengths) if isinstance(lengths, Sequence) else lengths,
            keep=keep,
            heal=heal,
            method=method,
            form=form,
        )
        return drive(fill(self.workbench(preset, **options), prefix, suffix, wanted), self._ask)

    def edit(
        self,
        text: str,
        instruction: str = "",
        *,
        before: str = "",
        behind: str = "",
        windows: int = 3,
        preset: str | None = None,
        **options: Any,
    ) -> Edited:
        """`text` with the words changed that the model, under `instruction`, finds wrong.

        before, behind: texts around it that show what it is part of, and stay.
        windows: places to look at, at most, for each canvas of text.
        """
        bench = self.workbench(preset, **options)
        wanted = EditOptions(windows=windows)
        return drive(edit(bench, text, instruction, wanted, before=before, behind=behind), self._ask)

    def decide(
        self,
        input: str | Sequence[Mapping[str, Any]],  # noqa: A002
        questions: Sequence[Question],
        *,
        steps: int = 1,
        draws: int = 4,
        calibration: Calibration | None = None,
        preset: str | None = None,
        **options: Any,
    ) -> tuple[Decision, ...]:
        """How likely each choice of each question is, given a text or a conversation.

        draws: canvases of noise whose probabilities are averaged. steps: denoise steps before slots are read;
        more let questions agree with each other. calibration: fitted with `dgemma decide --fit`.
        """
        bench = self.workbench(preset, **options)
        rounds = decide(bench, input, questions, steps=steps, draws=draws, calibration=calibration)
        return drive(rounds, self._ask).decisions

    def workbench(self, preset: str | None = None, **options: Any) -> Workbench:
        """What fill, edit and decide work with."""
        params = GenerationParams.make(self.generation_defaults, preset=preset, **options)
        if params.deadline_s is not None:
            raise InputError("deadline_s does not apply to fill, edit and decide; lower max_tokens instead.")
        return Workbench(
            tokenizer=self.tokenizer,
            pieces=self._pieces,
            canvas_len=self.config.canvas_len,
            max_positions=self.config.max_positions,
            vocab_size=self.config.vocab_size,
            params=params,
            seed=seeds_for(1, None, params)[0],
            template=self.chat_template if self.has_chat_template else None,
            compiler=self._compiler(params),
        )

    def _compiler(self, params: GenerationParams) -> Compiler:
        if params.end_tokens not in self._compilers:
            vocab_size = self.config.vocab_size
            self._compilers[params.end_tokens] = Compiler(self.tokenizer, vocab_size, params.end_tokens)
        return self._compilers[params.end_tokens]

    @cached_property
    def _pieces(self) -> PieceTable:
        return PieceTable(self.tokenizer)

    def _ask(self, requests: Sequence[EngineRequest]) -> list[Answer]:
        """All of them in one batch."""
        numbered = [replace(request, row=row) for row, request in enumerate(requests)]
        events = self._local_engine.run(numbered)
        answers = {event.row: event.answer for event in events if isinstance(event, Finish)}
        return [answers[row] for row in range(len(requests))]

    def _run(
        self,
        prompts: Sequence[tuple[int, ...]],
        seeds: Sequence[int] | None,
        preset: str | None,
        sampler: Sampler | None,
        options: dict[str, Any],
        *,
        drafts: bool,
        pins: Mapping[int, int | Sequence[int]] | None = None,
        thinks: bool = False,
        form: Form | None = None,
    ) -> Iterator[Event]:
        given = Given.from_pins(pins)
        form = form or take_form(options)
        params = GenerationParams.make(self.generation_defaults, preset=preset, **options)
        constraint = None if form is None else self._compiler(params).compile(form, thinks=thinks)
        for number, prompt in enumerate(prompts):
            which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
            check_prompt(prompt, self.config.vocab_size, which)
        if params.stop:
            self.tokenizer  # noqa: B018  (without one there is no text to stop at: say so)
        requests = [
            EngineRequest(
                prompt=prompt,
                seed=seed,
                params=params,
                row=row,
                sampler=sampler,
                drafts=drafts,
                given=given,
                constraint=constraint,
            )
            for row, (prompt, seed) in enumerate(
                zip(prompts, seeds_for(len(prompts), seeds, params), strict=True)
            )
        ]
        return self._local_engine.run(requests)

    @property
    def _local_engine(self) -> LocalEngine:
        if self._engine is None:
            self._engine = LocalEngine(self.stack, self.tokenizer if self.has_tokenizer else None)
        return self._engine

    def _text_ids(self, text: str) -> tuple[int, ...]:
        bos = self.tokenizer.bos_id
        return (*(() if bos is None else (bos,)), *self.tokenizer.encode(text))

    @property
    def _directory(self) -> Path:
        if self._source is None:
            raise CheckpointError(
                "this model has no files behind it, so no tokenizer; load it from a directory."
            )
        return self._source.path

    @property
    def has_tokenizer(self) -> bool:
        return self._source is not None and (self._source.path / "tokenizer.json").is_file()

    def save(self, path: str | Path, *, max_shard_bytes: int = 5_000_000_000) -> None:
        """Write the released layout; tensors kept aside (vision) and tokenizer files come along."""
        if has_adapter(self.stack):
            raise InputError(
                "this model has an adapter beside its weights; save merged(), or the adapter alone with "
                "save_adapter()."
            )
        save(self.stack, path, self._source, max_shard_bytes=max_shard_bytes)
