"""An engine for a server, from a loaded model and what the machine has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from dgemma.engine.async_engine import AsyncEngine
from dgemma.engine.capacity import plan_capacity
from dgemma.engine.engine import Engine
from dgemma.engine.memory import Memory
from dgemma.engine.scheduler import Limits
from dgemma.engine.service import ServedModel
from dgemma.errors import InputError
from dgemma.machine import inspect_machine
from dgemma.model.stack import Stack
from dgemma.params import GenerationParams
from dgemma.text.tokenizer import Tokenizer

PAGE_LEN = 32


class Model(Protocol):
    """What a server asks of a `LanguageModel`."""

    stack: Stack

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def generation_defaults(self) -> GenerationParams: ...

    def with_adapter(self, adapter: str | Path) -> Model: ...

    def fingerprint(self) -> str: ...


def open_engine(
    lm: Model,
    *,
    adapters: Mapping[str, str | Path] | None = None,
    slots: int = 16,
    piece: int = 1024,
    max_model_len: int | None = None,
    memory_fraction: float = 0.9,
    canvas_len: int | None = None,
    queue_len: int = 256,
    reuse_prefixes: bool = True,
) -> AsyncEngine:
    """Made in an event loop or before it; it begins to work with the first request."""
    base = lm.stack.with_lengths(canvas_len=canvas_len, max_positions=max_model_len)
    stacks: dict[str | None, Stack] = {None: base}
    for name, path in (adapters or {}).items():
        stack = lm.with_adapter(path).stack
        stacks[name] = stack.with_lengths(canvas_len=canvas_len, max_positions=max_model_len)
    config = base.config
    capacity = plan_capacity(
        config,
        num_bytes=int(memory_fraction * free_bytes(base.norm.weight.device)),
        slots=slots,
        page_len=PAGE_LEN,
        item_bytes=base.embedding.dtype.itemsize,
        most_len=config.max_positions,
    )
    memory = Memory(
        page_len=PAGE_LEN,
        window=config.window,
        full_pages=capacity.full_pages,
        window_pages=capacity.window_pages,
        most_gathered=capacity.most_gathered,
        reuse=reuse_prefixes,
    )
    block = base.execution.encode_block
    if piece < block:
        raise InputError(f"the prefill chunk is {piece} tokens; it must be at least {block}.")
    limits = Limits(slots=slots, piece=piece, block=block)
    served = ServedModel(
        max_positions=min(config.max_positions, memory.longest),
        canvas_len=config.canvas_len,
        vocab_size=config.vocab_size,
        defaults=lm.generation_defaults,
        adapters=tuple(adapters or ()),
        fingerprint=_fingerprint(lm),
    )
    engine = Engine(stacks, memory, limits, tokenizer=lm.tokenizer)
    return AsyncEngine(engine, served, max_waiting=queue_len)


def _fingerprint(lm: Model) -> str:
    """What the text of a seed depends on: the weights, their numbers, and how they are run."""
    way = "exact" if lm.stack.execution.exact else "default"
    return f"{lm.fingerprint()[:16]}-{str(lm.stack.embedding.dtype).removeprefix('torch.')}-{way}"


def free_bytes(device: torch.device) -> int:
    """What the device has left, the weights being there already."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return inspect_machine().available_bytes
