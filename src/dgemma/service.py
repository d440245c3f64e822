"""The engine and the text functions that a server needs, of a loaded model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dgemma.engine.service import ServedModel
from dgemma.server.http.settings import LoadOptions, Settings
from dgemma.server.text import CheckpointText

if TYPE_CHECKING:
    from dgemma.engine.async_engine import AsyncEngine
    from dgemma.language_model import LanguageModel


def open_engine_of(
    lm: LanguageModel, options: LoadOptions, settings: Settings, *, queue_len: int
) -> AsyncEngine:
    from dgemma.engine.open import open_engine  # brings torch

    return open_engine(
        lm,
        adapters={adapter.name: adapter.path for adapter in settings.adapters},
        max_num_seqs=settings.max_num_seqs,
        chunk_size=settings.prefill_chunk,
        max_model_len=settings.max_model_len,
        memory_fraction=settings.memory_fraction,
        canvas_len=settings.canvas_length,
        queue_len=queue_len,
        max_tenant_waiting=max(1, queue_len // 2),
        step_timeout_s=settings.step_timeout_s,
        reuse_prefixes=options.reuse_prefixes,
    )


def text_of(lm: LanguageModel, served: ServedModel) -> CheckpointText:
    return CheckpointText.of(lm.tokenizer, lm.chat_template if lm.has_chat_template else None, served)
