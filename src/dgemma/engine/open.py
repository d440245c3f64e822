"""Build an engine for a server from a loaded model and the free memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from dgemma.engine.async_engine import AsyncEngine
from dgemma.engine.engine import Engine
from dgemma.engine.kv_cache_manager import KVCacheManager, plan_capacity
from dgemma.engine.prefix_cache import BLOCK_SIZE
from dgemma.engine.rank_engine import make_engine
from dgemma.engine.scheduler import SchedulerConfig
from dgemma.engine.service import ServedModel
from dgemma.errors import InputError
from dgemma.images.prompt import ModelImages
from dgemma.machine import memory_facts
from dgemma.model.transformer import Transformer
from dgemma.params import GenerationParams
from dgemma.text.tokenizer import Tokenizer


class Model(Protocol):
    """The part of `LanguageModel` that an engine needs."""

    transformer: Transformer

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def generation_defaults(self) -> GenerationParams: ...

    @property
    def images(self) -> ModelImages | None: ...

    def with_adapter(self, adapter: str | Path) -> Model: ...

    def fingerprint(self) -> str: ...


def open_engine(
    lm: Model,
    *,
    adapters: Mapping[str, str | Path] | None = None,
    max_num_seqs: int = 16,
    chunk_size: int = 1024,
    max_model_len: int | None = None,
    memory_fraction: float = 0.9,
    canvas_len: int | None = None,
    queue_len: int = 256,
    max_tenant_waiting: int | None = None,
    step_timeout_s: float | None = None,
    reuse_prefixes: bool = True,
) -> AsyncEngine:
    """May be called before the event loop runs; the engine starts with the first request."""
    base = lm.transformer.with_lengths(canvas_len=canvas_len, max_positions=max_model_len)
    models: dict[str | None, Transformer] = {None: base}
    for name, path in (adapters or {}).items():
        model = lm.with_adapter(path).transformer
        models[name] = model.with_lengths(canvas_len=canvas_len, max_positions=max_model_len)
    config = base.config
    capacity = plan_capacity(
        base.part.attention,
        num_bytes=int(memory_fraction * _cache_bytes(base)),
        max_num_seqs=max_num_seqs,
        block_size=BLOCK_SIZE,
        item_bytes=base.embedding.dtype.itemsize,
        max_len=config.max_positions,
    )
    encode_block = base.execution.encode_block
    if chunk_size < encode_block:
        raise InputError(f"the prefill chunk is {chunk_size} tokens; it must be at least {encode_block}.")
    limits = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        chunk_size=chunk_size,
        encode_block=encode_block,
        rows_add_up=base.execution.exact,
    )

    def new_engine() -> Engine:
        kv_manager = KVCacheManager(
            block_size=BLOCK_SIZE,
            window=config.window,
            full_blocks=capacity.full_blocks,
            window_blocks=capacity.window_blocks,
            max_gathered=capacity.max_gathered,
            reuse=reuse_prefixes,
        )
        return make_engine(models, kv_manager, limits, tokenizer=lm.tokenizer)

    engine = new_engine()
    served = ServedModel(
        max_positions=min(config.max_positions, engine.max_len),
        canvas_len=config.canvas_len,
        vocab_size=config.vocab_size,
        defaults=lm.generation_defaults,
        adapters=tuple(adapters or ()),
        fingerprint=_fingerprint(lm),
        image_settings=None if lm.images is None else lm.images.settings,
    )
    return AsyncEngine(
        engine,
        served,
        max_waiting=queue_len,
        max_tenant_waiting=max_tenant_waiting,
        make_engine=None if base.ranks.size > 1 else new_engine,  # the other ranks have only this one
        step_timeout_s=step_timeout_s,
    )


def _fingerprint(lm: Model) -> str:
    """What the text of a seed depends on: weights, dtype, and mode of execution."""
    mode = "exact" if lm.transformer.execution.exact else "default"
    if mode == "default" and lm.transformer.norm.weight.device.type == "cpu":
        mode = f"{torch.get_num_threads()}-threads"  # which share the sums of a product
    if lm.transformer.ranks.size > 1:  # which share the sums, too
        mode += f"-{lm.transformer.ranks.size}-ranks"
    return f"{lm.fingerprint()[:16]}-{str(lm.transformer.embedding.dtype).removeprefix('torch.')}-{mode}"


def _cache_bytes(model: Transformer) -> int:
    """Memory for this process's KV cache: the least that any rank has."""
    device, ranks = model.norm.weight.device, model.ranks
    found = free_bytes(device)
    if device.type == "cpu":
        found //= ranks.size  # which share it
    return min(int(each) for each in ranks.gather(torch.tensor([found], device=device)))


def free_bytes(device: torch.device) -> int:
    """Free memory of the device, after the weights are loaded."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return memory_facts().available_bytes
