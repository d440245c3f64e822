"""Rendering a chat in the worker process, beside the same rendering in this process.

python -m benchmarks.chat_template
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import dgemma
from benchmarks import record
from dgemma.text.sandbox import TemplateSandbox
from dgemma.text.template_process import TEMPLATES

SOURCE = (Path(dgemma.__file__).parent / "data" / "tokenizer" / "chat_template.jinja").read_text()


def chat(turns: int) -> dict[str, object]:
    messages = [
        {"role": "assistant" if i % 2 else "user", "content": f"{i} " + "words " * 40} for i in range(turns)
    ]
    return {"messages": messages, "add_generation_prompt": True, "bos_token": "<bos>", "tools": None}


def milliseconds(work: Callable[[], object], times: int = 50) -> float:
    began = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - began) / times * 1000


def main() -> None:
    began = time.perf_counter()
    TEMPLATES.ask(SOURCE, (), None)
    found: dict[str, object] = {"first_use_s": round(time.perf_counter() - began, 3)}
    sandbox = TemplateSandbox()
    template = sandbox.compile_marked(SOURCE, str)
    for turns in (1, 20, 200):
        variables = chat(turns)
        assert TEMPLATES.ask(SOURCE, (), variables).text == sandbox.render_bounded(template, variables)
        pairs = [
            (
                milliseconds(lambda v=variables: TEMPLATES.ask(SOURCE, (), v)),
                milliseconds(lambda v=variables: sandbox.render_bounded(template, v)),
            )
            for _ in range(9)
        ]
        worker, here = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratios = sorted(a / b for a, b in pairs)
        found[f"{turns}_messages"] = {
            "worker_ms": round(worker, 3),
            "in_process_ms": round(here, 3),
            "ratio": [round(ratios[at], 2) for at in (0, len(ratios) // 2, -1)],
        }
    record.write("chat_template", found)


if __name__ == "__main__":
    main()
