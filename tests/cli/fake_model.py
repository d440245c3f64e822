"""`dgemma` around a model that is not there: loading takes no time, and a script says what is written.

As a process: `python -m cli.fake_model ARGUMENTS`; answers to seeds from FAKE_HOLDS_FROM on never end, and
each canvas takes FAKE_SECONDS.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import dgemma
from dgemma.cli import options
from dgemma.cli.main import main
from dgemma.engine.request import EngineRequest
from server.fake_engine import FakeEngine, Script, by_seed
from text.bundled import TEMPLATE, TOKENIZER


class LoadedModel:
    tokenizer = TOKENIZER
    chat_template = TEMPLATE
    has_chat_template = True


@dataclass
class FakeModel:
    """What was asked of it."""

    script: Callable[[EngineRequest], Script] = by_seed
    progress: list[tuple[int, int]] = field(default_factory=list)  # told while it is loaded
    loads: list[dict[str, Any]] = field(default_factory=list)
    opened: list[dict[str, Any]] = field(default_factory=list)
    engine: FakeEngine = field(init=False)

    def load(self, model: str, *, progress: Callable[[int, int], None], **options: Any) -> LoadedModel:
        self.loads.append({"model": model, **options})
        for done, total in self.progress:
            progress(done, total)
        return LoadedModel()

    def open_engine(self, lm: LoadedModel, **options: Any) -> FakeEngine:
        self.opened.append(options)
        self.engine = FakeEngine(self.script, adapters=tuple(options["adapters"]))
        # The ids of the real tokenizer, in front of an engine that writes bytes.
        self.engine._model = replace(self.engine.model, vocab_size=1 << 20)
        return self.engine

    def install(self, set_item: Callable[[MutableMapping[str, Any], str, Any], None]) -> None:
        module = ModuleType("dgemma.engine.open")
        module.open_engine = self.open_engine  # type: ignore[attr-defined]
        set_item(sys.modules, module.__name__, module)
        set_item(dgemma.__dict__, "load", self.load)
        set_item(options.__dict__, "check_checkpoint", lambda model: None)


if __name__ == "__main__":
    holds_from = int(os.environ.get("FAKE_HOLDS_FROM", 1 << 40))
    seconds = float(os.environ.get("FAKE_SECONDS", 0))

    def script(request: EngineRequest) -> Script:
        if request.seed >= holds_from:
            return Script(text="x" * 100, holds_at=1)
        return replace(by_seed(request), delay_s=seconds)

    FakeModel(script).install(dict.__setitem__)
    sys.exit(main(sys.argv[1:]))
