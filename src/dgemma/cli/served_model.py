"""A model behind an engine, as `serve` and `run-batch` open it. What needs no weights is checked before."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dgemma.cli.generation_options import load_with_progress
from dgemma.cli.progress import print_line
from dgemma.errors import InputError
from dgemma.server.settings import Settings, is_usable_name

if TYPE_CHECKING:
    from dgemma.engine.service import EngineService
    from dgemma.server.text import CheckpointText


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How the model is loaded."""

    dtype: str = "auto"
    device: str = "cpu"
    exact: bool = False
    compile: bool = False
    reuse_prefixes: bool = True


def require_server_packages() -> None:
    try:
        for name in ("fastapi", "uvicorn"):
            importlib.import_module(name)
    except ImportError:
        raise InputError("the server needs FastAPI and uvicorn; run: pip install 'dgemma[server]'") from None


def served_name(model: str) -> str:
    """What callers name as model, unless they are told another name."""
    name = Path(model).name
    return name if is_usable_name(name) else "dgemma"


def check_fit(model: str, settings: Settings) -> None:
    """Refuse lengths and adapters that do not fit the model before a large one is read for nothing."""
    if not settings.adapters and settings.max_model_len is None and settings.canvas_length is None:
        return
    from dgemma.checkpoint.adapter_source import open_adapter
    from dgemma.checkpoint.hub import resolve
    from dgemma.checkpoint.source import read_config

    _, config = read_config(resolve(model))
    context = settings.max_model_len or config.max_positions
    canvas = settings.canvas_length or config.canvas_len
    if context > config.max_positions:
        raise InputError(
            f"--max-model-len is {context}; this model's context ends at {config.max_positions} tokens."
        )
    if context <= canvas:
        raise InputError(
            f"a context of {context} tokens has no room for a prompt and a canvas of {canvas}. "
            f"Give --max-model-len above {canvas}, or a smaller --canvas-length."
        )
    for adapter in settings.adapters:
        open_adapter(adapter.path, config)


def open_service(
    model: str,
    options: LoadOptions,
    settings: Settings,
    *,
    queue_len: int,
    say: Callable[[str], None] = print_line,
) -> tuple[EngineService, CheckpointText]:
    from dgemma.engine.open import open_engine
    from dgemma.server.text import CheckpointText

    lm = load_with_progress(
        model,
        say=say,
        dtype=options.dtype,
        device=options.device,
        exact=options.exact,
        compile=options.compile,
    )
    engine = open_engine(
        lm,
        adapters={adapter.name: adapter.path for adapter in settings.adapters},
        slots=settings.max_num_seqs,
        piece=settings.prefill_chunk,
        max_model_len=settings.max_model_len,
        memory_fraction=settings.memory_fraction,
        canvas_len=settings.canvas_length,
        queue_len=queue_len,
        reuse_prefixes=options.reuse_prefixes,
    )
    return engine, CheckpointText(lm.tokenizer, lm.chat_template if lm.has_chat_template else None)
