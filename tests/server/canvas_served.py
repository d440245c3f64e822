"""The server in this process with a real engine: a random model, exact, so that company changes no bit."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import dgemma
from dgemma import LanguageModel
from dgemma.engine.open import open_engine
from dgemma.server.app import create_app
from dgemma.server.http.settings import Settings
from dgemma.server.text import CheckpointText
from server.real_server import write_model
from server.replicas import NUM_REPLICAS, as_one
from server.served import on_a_port

KEY = "a-key"


@cache
def tiny() -> LanguageModel:
    """What is served, for this process to ask directly. Two steps per canvas: its words mean nothing."""
    scratch = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    return dgemma.load(write_model(scratch / "tiny", steps=2), exact=True)


@contextmanager
def served_tiny(
    *, slots: int = 8, queue_len: int = 64, replicas: int = NUM_REPLICAS, **settings: Any
) -> Iterator[str]:
    """-> the address."""
    lm = tiny()
    engine = as_one(
        [
            open_engine(lm, max_num_seqs=slots, queue_len=queue_len, memory_fraction=0.1)
            for _ in range(replicas)
        ]
    )
    text = CheckpointText(lm.tokenizer, lm.chat_template)
    with on_a_port(create_app(Settings(api_keys=(KEY,), **settings), engine, text)) as address:
        yield address
