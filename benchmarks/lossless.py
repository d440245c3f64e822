"""Lossless decoding against causal decoding of the same seed: tokens that differ. None should.

    python -m benchmarks.lossless                (1,000 prompts of each bundled model; --prompts N for fewer)

Greedy and sampled, with top-k, top-p and stop strings, in fp32 and in exact bf16. The causal texts are
written one request at a time. The lossless ones share the engine with canvases, verified drafts and each
other, sixteen at a time, and find beginnings of their prompts in the prefix cache.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from benchmarks import record
from dgemma.engine.local import LocalEngine
from dgemma.engine.request import EngineRequest
from dgemma.events import Answer, Finish
from dgemma.language_model import LanguageModel
from dgemma.loading import load
from dgemma.params import GenerationParams
from dgemma.sudoku.puzzles import held_out
from dgemma.sudoku.tokens import to_text
from recipes.english.scenes import make_scene
from recipes.forms.messages import make_message

AT_ONCE = 16
DTYPES = ("float32", "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--models", nargs="*", choices=PROMPTS, default=list(PROMPTS))
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--suffix", default="", help="of the result file's name")
    args = parser.parse_args()
    findings: dict[str, Any] = {}
    for name in args.models:
        for dtype in args.dtypes:
            # In exact mode a row's bits do not depend on its batch; in fp32 they are compared without it too.
            lm = load(f"bundled:{name}", dtype=dtype, exact=dtype == "bfloat16")
            found = findings[f"{name}, {dtype}"] = compare(lm, PROMPTS[name](lm, args.prompts))
            print(name, dtype, found, flush=True)
    record.write("lossless", findings, args.suffix)


def compare(lm: LanguageModel, prompts: Iterator[list[int]]) -> dict[str, Any]:
    rng, began = random.Random(0), time.perf_counter()
    asked = [random_request(row, prompt, rng) for row, prompt in enumerate(prompts)]
    causal = {}
    for request in asked:
        causal.update(answers(lm, [as_way(request, "causal")]))
    lossless: dict[int, Answer] = {}
    for begin in range(0, len(asked), AT_ONCE):
        group = asked[begin : begin + AT_ONCE]
        others = [
            replace(as_way(request, way), row=len(asked) + number)
            for number, request in enumerate(group[:4])
            for way in (("diffuse", "verified")[number % 2],)
        ]
        lossless.update(answers(lm, [*(as_way(request, "lossless") for request in group), *others]))
    different = [
        request.row for request in asked if causal[request.row].tokens != lossless[request.row].tokens
    ]
    own = [lossless[request.row] for request in asked]
    return {
        "prompts": len(asked),
        "greedy": sum(request.params.temperature == 0 for request in asked),
        "tokens": sum(len(answer.tokens) for answer in own),
        "accepted_tokens": sum(sum(answer.accepted) for answer in own),
        "drafts": sum(len(answer.accepted) for answer in own),
        "different": len(different),
        "first_different": different[:5],
        "seconds": round(time.perf_counter() - began),
    }


def random_request(row: int, prompt: list[int], rng: random.Random) -> EngineRequest:
    params = GenerationParams(
        max_tokens=rng.randint(8, 24),
        draft_steps=rng.randint(1, 3),
        temperature=rng.choice((0.0, 0.0, 0.7, 1.0)),
        top_k=rng.choice((None, None, 8)),
        top_p=rng.choice((None, None, 0.9)),
        stop=rng.choice(((), (), (".",))),
    )
    return EngineRequest(prompt=tuple(prompt), seed=rng.randrange(1 << 32), params=params, row=row)


def as_way(request: EngineRequest, decode: str) -> EngineRequest:
    """The request decoded so. A canvas by diffusion knows no top-k and top-p of the causal pass."""
    changes: dict[str, Any] = {"decode": decode}
    if decode == "diffuse":
        changes |= {"top_k": None, "top_p": None, "max_denoising_steps": 4}
    return replace(request, params=replace(request.params, **changes))


def answers(lm: LanguageModel, requests: list[EngineRequest]) -> dict[int, Answer]:
    engine = ENGINES.setdefault(id(lm), LocalEngine(lm.transformer, lm.tokenizer))
    return {event.row: event.answer for event in engine.run(requests) if isinstance(event, Finish)}


ENGINES: dict[int, LocalEngine] = {}  # one per model, with its prefix cache


def text_prompts(lm: LanguageModel, count: int) -> Iterator[list[int]]:
    """Places of scenes. Half begin at the beginning of one, and may share it."""
    rng = random.Random(1)
    texts = [lm.tokenizer.encode(make_scene(number, seed=3).text) for number in range(100)]
    for number in range(count):
        tokens, length = rng.choice(texts), rng.randint(4, 80)
        begin = 0 if number % 2 else rng.randrange(max(1, len(tokens) - length))
        yield [2, *tokens[begin : begin + length]]


def form_prompts(lm: LanguageModel, count: int) -> Iterator[list[int]]:
    for number in range(count):
        message = make_message("values", number, seed=5)
        yield list(lm.chat_template.render([{"role": "user", "content": message.prompt}]))


def sudoku_prompts(lm: LanguageModel, count: int) -> Iterator[list[int]]:
    for puzzle in held_out("easy")[:count]:
        yield [2, *lm.tokenizer.encode(to_text(puzzle.clues))]


PROMPTS: dict[str, Callable[[LanguageModel, int], Iterator[list[int]]]] = {
    "text": text_prompts,
    "forms": form_prompts,
    "sudoku": sudoku_prompts,
}


if __name__ == "__main__":
    main()
