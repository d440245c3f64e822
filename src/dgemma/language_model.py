"""The handle a user holds: a loaded model, its two doors, and generation."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from dgemma.checkpoint.adapter import load_adapter, save_adapter
from dgemma.checkpoint.adapter_source import open_adapter
from dgemma.checkpoint.fingerprint import fingerprint
from dgemma.checkpoint.hub import resolve
from dgemma.checkpoint.load import Progress, load_stack
from dgemma.checkpoint.save import save
from dgemma.checkpoint.source import CheckpointSource, open_checkpoint, read_json
from dgemma.diffusion.step import Sampler
from dgemma.engine.local import LocalEngine
from dgemma.engine.service import EngineRequest
from dgemma.errors import CheckpointError, DeviceError, InputError, suggestion
from dgemma.events import Answer, Event, Finish
from dgemma.generation.job import check_prompt, read_prompts, seeds_for
from dgemma.generation.parts import compile_ahead
from dgemma.model.cache import KVCache
from dgemma.model.config import ModelConfig
from dgemma.model.execution import default_execution
from dgemma.model.lora import LoraSettings, attach, detach, has_adapter, merged
from dgemma.model.pieces import cut_piece, piece_len
from dgemma.model.stack import Stack
from dgemma.params import GenerationParams
from dgemma.text.chat_template import ChatTemplate
from dgemma.text.detokenizer import Detokenizer
from dgemma.text.tokenizer import Tokenizer

# Shapes: batch = rows, tokens = tokens given now, canvas = tokens of the canvas.

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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


def check_device(name: str) -> torch.device:
    """The device called `name`, if this machine has it."""
    try:
        device = torch.device(name)
    except RuntimeError:
        known = ("cpu", "cuda", "mps")
        raise DeviceError(
            f"device {name!r} is not known{suggestion(name, known)} Known: {', '.join(known)}."
        ) from None
    available = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if not available.get(device.type, False):
        raise DeviceError(
            f"device {name!r} is not available here; `dgemma doctor` shows what this machine has."
        )
    return device


def check_dtype(name: str, source: CheckpointSource) -> torch.dtype:
    if name == "auto":
        # Old files say torch_dtype. Files that say nothing, or fp16, run in bf16.
        stored = source.raw_config.get("dtype", source.raw_config.get("torch_dtype"))
        return DTYPES.get(str(stored), torch.bfloat16)
    if name not in DTYPES:
        raise InputError(
            f"dtype {name!r} is not supported{suggestion(name, DTYPES)} Supported: auto, {', '.join(DTYPES)}."
        )
    return DTYPES[name]


class LanguageModel:
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
        self.stack = stack
        self._source = source
        self._engine: LocalEngine | None = None

    @property
    def config(self) -> ModelConfig:
        return self.stack.config

    @property
    def dtype(self) -> torch.dtype:
        return self.stack.embedding.dtype

    @property
    def device(self) -> torch.device:
        return next(self.stack.parameters()).device

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in memory, an adapter's included."""
        return sum(tensor.nbytes for tensor in chain(self.stack.parameters(), self.stack.buffers()))

    def new_cache(self, batch: int = 1, capacity: int | None = None) -> KVCache:
        """An empty cache for `batch` rows; it grows by itself, `capacity` only saves the growing."""
        return KVCache(self.config, batch, dtype=self.dtype, device=self.device, capacity=capacity)

    def encode(self, tokens: Tensor, cache: KVCache, lengths: Sequence[int] | Tensor | None = None) -> Tensor:
        """Read `tokens` [batch, tokens] causally and append them to `cache`.

        `lengths`: how many tokens of each row count, for rows of different length (the rest is
        padding of any token, at the end). -> final-normed hidden states [batch, tokens, hidden],
        zeros in the padding.
        """
        tokens = self._checked(tokens, cache, "tokens")
        remaining = self._lengths(lengths, tokens)
        cache.check_room(remaining)
        execution = self.stack.execution
        block = execution.encode_block if execution.exact else 1
        done = [0] * cache.batch
        joined: Tensor | None = None
        while any(remaining):
            lead = [length % block for length in cache.lengths]
            at_most = piece_len(self.config, cache.batch, max(cache.lengths), block)
            counts = [min(left, at_most - skip) for left, skip in zip(remaining, lead, strict=True)]
            width = -(-max(map(sum, zip(lead, counts, strict=True))) // block) * block
            piece = cut_piece(tokens, done, lead, counts, width)
            hidden, fresh = self.stack.encode(piece, cache.context(), lead=tuple(lead), counts=tuple(counts))
            cache.append(fresh, counts, lead)
            if piece is tokens:  # one piece without padding: the usual prompt
                return hidden
            joined = self._zeros(tokens) if joined is None else joined
            for row, (start, skip, count) in enumerate(zip(done, lead, counts, strict=True)):
                joined[row, start : start + count] = hidden[row, skip : skip + count]
            done = [d + c for d, c in zip(done, counts, strict=True)]
            remaining = [r - c for r, c in zip(remaining, counts, strict=True)]
        return self._zeros(tokens) if joined is None else joined

    def denoise(self, canvas: Tensor, cache: KVCache, soft: Tensor | None = None) -> Tensor:
        """One refinement forward of `canvas` [batch, canvas]; the cache is only read.

        `soft` [batch, canvas, hidden]: the soft embedding of the previous step's logits, None at a
        canvas's first step. -> final-normed hidden states [batch, canvas, hidden].
        """
        canvas = self._checked(canvas, cache, "canvas")
        shape = (*canvas.shape, self.config.hidden_size)
        if soft is not None and tuple(soft.shape) != shape:
            raise InputError(f"soft has shape {list(soft.shape)}; it must be {list(shape)}.")
        cache.check_room([canvas.shape[1]] * cache.batch)
        return self.stack.denoise(canvas, cache.context(), soft)

    def logits(self, hidden: Tensor) -> Tensor:
        """Soft-capped logits in fp32 [..., vocabulary]. Large: 268 MB for one released canvas."""
        return self.stack.logits(hidden)

    def soft_embedding(self, logits: Tensor) -> Tensor:
        """The mean embedding under softmax(`logits`) [..., hidden], the `soft` of the next step."""
        return self.stack.soft_embedding(logits)

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
        **options: Any,
    ) -> Answer | list[Answer]:
        """Continue a text, or a list of texts in one batch. Token ids are taken as they are.

        seeds: one per prompt of a list; with `seed=n` alone, prompt i takes n + i.
        preset: "fast", "balanced" or "thorough". sampler: your own, in place of the options'.
        options: the fields of `dgemma.GenerationParams`.
        """
        prompts, is_list = read_prompts(prompt, self._text_ids)
        events = self._run(prompts, seeds, preset, sampler, options, drafts=False)
        answers = {e.row: e.answer for e in events if isinstance(e, Finish)}
        return [answers[row] for row in range(len(prompts))] if is_list else answers[0]

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        drafts: bool = True,
        preset: str | None = None,
        sampler: Sampler | None = None,
        **options: Any,
    ) -> Iterator[Event]:
        """Like `generate` for one prompt: `Draft` per step, `Commit` per canvas, `Finish` at the end."""
        prompts, is_list = read_prompts(prompt, self._text_ids)
        if is_list:
            raise InputError("prompt is a list of prompts; stream takes one. Use generate for a batch.")
        return self._run(prompts, None, preset, sampler, options, drafts=drafts)

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
        preset: str | None = None,
        sampler: Sampler | None = None,
        **options: Any,
    ) -> Answer:
        """Answer a conversation through the checkpoint's chat template.

        Give the whole conversation at each turn; what earlier turns already read is not read again.
        """
        events = self.stream_chat(
            messages,
            tools=tools,
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
        return self._run([tuple(prompt)], None, preset, sampler, options, drafts=drafts)

    def _run(
        self,
        prompts: Sequence[tuple[int, ...]],
        seeds: Sequence[int] | None,
        preset: str | None,
        sampler: Sampler | None,
        options: dict[str, Any],
        *,
        drafts: bool,
    ) -> Iterator[Event]:
        params = GenerationParams.make(self.generation_defaults, preset=preset, **options)
        for number, prompt in enumerate(prompts):
            which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
            check_prompt(prompt, self.config.vocab_size, which)
        if params.stop:
            self.tokenizer  # noqa: B018  (without one there is no text to stop at: say so)
        requests = [
            EngineRequest(prompt=prompt, seed=seed, params=params, row=row, sampler=sampler, drafts=drafts)
            for row, (prompt, seed) in enumerate(
                zip(prompts, seeds_for(len(prompts), seeds, params), strict=True)
            )
        ]
        if self._engine is None:
            self._engine = LocalEngine(self.stack, self.tokenizer if self.has_tokenizer else None)
        return self._engine.run(requests)

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

    def _zeros(self, tokens: Tensor) -> Tensor:
        return torch.zeros(*tokens.shape, self.config.hidden_size, dtype=self.dtype, device=self.device)

    def _checked(self, tokens: Tensor, cache: KVCache, name: str) -> Tensor:
        if tokens.ndim != 2 or tokens.dtype not in (torch.int32, torch.int64):
            raise InputError(
                f"{name} is {tokens.dtype} of shape {list(tokens.shape)}; it must be whole numbers "
                "[batch, tokens]."
            )
        if tokens.shape[0] != cache.batch or tokens.shape[1] < 1:
            raise InputError(
                f"{name} has shape {list(tokens.shape)}; this cache takes {cache.batch} rows of at "
                "least one token."
            )
        if tokens.device.type == "cpu":  # elsewhere the check would stall the device
            low, high = (int(bound) for bound in tokens.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                raise InputError(
                    f"{name} holds token {low if low < 0 else high}; this vocabulary ends at "
                    f"{self.config.vocab_size - 1}."
                )
        return tokens.to(self.device)

    def _lengths(self, lengths: Sequence[int] | Tensor | None, tokens: Tensor) -> list[int]:
        rows, width = tokens.shape
        if lengths is None:
            return [width] * rows
        values = [int(n) for n in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)]
        if len(values) != rows or not all(0 <= n <= width for n in values):
            raise InputError(
                f"lengths is {values}; it must hold one number from 0 to {width} for each of {rows} rows."
            )
        return values
