"""What a constraint costs at the released vocabulary and canvas: compiling it, and a step beside a free one.

    python -m benchmarks.constraint_cost tokenizer_gemma4.model                    (the medium geometry)
    python -m benchmarks.constraint_cost tokenizer_gemma4.model --layers 2         (released widths)

The vocabulary is Gemma 4's, as a sentencepiece model (in the wheel of `maxtext`). Weights are random: what a
step costs does not depend on them. Free and constrained steps alternate; a figure is the median of their
ratios, with the smallest and largest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.training_memory import random_model
from dgemma.checkpoint.presets import PRESETS
from dgemma.constraint.automaton import build
from dgemma.constraint.clock import Clock
from dgemma.constraint.constraint import Constraint
from dgemma.constraint.json_schema import json_object_pattern, schema_pattern
from dgemma.constraint.json_text import JsonStyle
from dgemma.constraint.pattern import Control, Either, Node, Repeat, Sequence, parse
from dgemma.constraint.token_automaton import meet
from dgemma.constraint.word_trie import WordTrie
from dgemma.diffusion.noise import Use, place_at, random_tokens
from dgemma.diffusion.step import open_canvas
from dgemma.engine.following import Following
from dgemma.generation.parts import refine, sampler_for
from dgemma.language_model import LanguageModel
from dgemma.params import GenerationParams

CPU = torch.device("cpu")
END_TOKENS = (1, 106)
TEXT: dict[str, Any] = {"type": "string", "maxLength": 60}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "city": {"type": "string"},
                "zip": {"type": "integer"},
            },
            "required": ["street", "city"],
        },
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "tags"],
}
ORDINARY: dict[str, Any] = {
    "person": PERSON,
    "verdict": {
        "type": "object",
        "properties": {
            "reason": {"type": "string"},
            "verdict": {"enum": ["yes", "no", "unsure"]},
            "score": {"type": "number", "minimum": 0, "maximum": 1},
        },
        "required": ["reason", "verdict", "score"],
    },
    "list of persons": {"type": "array", "items": PERSON, "minItems": 1},
    "sentiments": {"type": "array", "items": {"enum": ["good", "bad", "neutral"]}},
    "either of two": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "circle"}, "radius": {"type": "number"}},
                "required": ["kind", "radius"],
            },
            {
                "type": "object",
                "properties": {
                    "kind": {"const": "box"},
                    "sides": {"type": "array", "items": {"type": "number"}},
                },
                "required": ["kind", "sides"],
            },
        ]
    },
    "tree": {
        "type": "object",
        "properties": {"label": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["label"],
    },
    "any object": None,
    "telephone": r"\+?\d{1,3} \(\d{3}\) \d{3}-\d{4}",
    "choice": "yes|no|perhaps|I do not know",
    "date and words": r"\d{4}-\d\d-\d\d: ([A-Za-z]+ ){3,30}\.",
}
LARGE: dict[str, Any] = {
    "a string of up to 200": {"type": "string", "maxLength": 200},
    "a string of up to 2000": {"type": "string", "maxLength": 2000},
    "200 properties": {
        "type": "object",
        "properties": {f"field_{n}": {"type": ("string", "integer", "boolean")[n % 3]} for n in range(200)},
        "required": [f"field_{n}" for n in range(0, 200, 2)],
    },
}


def read_words(path: Path) -> WordTrie:
    """The trie of a sentencepiece vocabulary."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    words: list[bytes | None] = []
    for id_ in range(model.get_piece_size()):
        piece = model.id_to_piece(id_)
        if model.is_byte(id_):
            words.append(bytes([int(piece[3:5], 16)]))
        elif model.is_control(id_) or model.is_unknown(id_) or id_ in END_TOKENS:
            words.append(None)
        else:
            words.append(piece.replace("▁", " ").encode())
    return WordTrie.of(words)


def pattern_of(asked: Any, clock: Clock) -> Node:
    if isinstance(asked, str):
        return parse(asked)
    return (
        json_object_pattern(JsonStyle()) if asked is None else schema_pattern(asked, JsonStyle(), clock=clock)
    )


def compiled(asked: Any, trie: WordTrie, seconds: float = 10.0) -> Constraint:
    clock = Clock(seconds)
    ends = Repeat(Either(tuple(map(Control, END_TOKENS))), 0, None)
    automaton = meet(build(Sequence((pattern_of(asked, clock), ends)), clock), trie, clock)
    return Constraint(automaton=automaton, end_tokens=END_TOKENS)


def seconds(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


class Steps:
    """Whole steps of one canvas: forward, look at the vocabulary, next canvas."""

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm
        self.params = GenerationParams()
        self.sampler = sampler_for(self.params)
        self.cache = lm.new_cache(1)
        config = lm.config
        lm.encode(torch.randint(config.vocab_size, (1, 64)), self.cache)
        place = place_at([1], [0], [0], CPU)
        self.state = open_canvas(random_tokens(place, Use.OPEN, config.canvas_len, config.vocab_size))
        self.soft = torch.zeros(1, config.canvas_len, config.hidden_size, dtype=lm.stack.embedding.dtype)

    def take(self, constraint: Constraint | None) -> None:
        canvas_len = self.lm.config.canvas_len
        hidden = self.lm.denoise(self.state.canvas, self.cache, self.soft)
        strings = None
        if constraint is not None:
            strings = [Following(constraint, 4 * canvas_len, None).strings(0, canvas_len, CPU)]
        place = place_at([1], [0], [1], CPU)
        refine(self.lm.stack, self.state, hidden, place, self.sampler, self.params, None, None, strings)


def measure(name: str, asked: Any, trie: WordTrie, steps: Steps, repeats: int) -> dict[str, Any]:
    found: list[Constraint] = []
    compile_s = seconds(lambda: found.append(compiled(asked, trie)))
    constraint, machine = found[0], found[0].automaton
    steps.take(constraint)
    ratios, free, bound = [], [], []
    for _ in range(repeats):
        free.append(seconds(lambda: steps.take(None)))
        bound.append(seconds(lambda: steps.take(constraint)))
        ratios.append(bound[-1] / free[-1])
    row = {
        "compile_s": round(compile_s, 3),
        "states": machine.num_states,
        "classes": machine.num_classes,
        "arrows": int((machine.maps >= 0).sum()),
        "words": int((machine.class_of_word > 0).sum()),
        "free_step_s": round(statistics.median(free), 3),
        "constrained_step_s": round(statistics.median(bound), 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
    }
    print(name, row, flush=True)
    return row


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokenizer", type=Path, help="sentencepiece model of Gemma 4")
    parser.add_argument("--layers", type=int, help="so many layers of the released widths")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of the constraints to measure")
    parser.add_argument("--suffix", default="", help="of the result file")
    args = parser.parse_args()
    config = PRESETS["medium"].config
    geometry = "medium: hidden 1024, 8 layers"
    if args.layers:
        config = replace(PRESETS["26b"].config, layers=PRESETS["26b"].config.layers[: args.layers])
        geometry = f"released widths, {args.layers} of 30 layers"
    lm = random_model(config)
    lm.stack.float()
    tries: list[WordTrie] = []
    trie_s = seconds(lambda: tries.append(read_words(args.tokenizer)))
    steps = Steps(lm)
    steps.take(None)
    rows = {
        name: measure(name, asked, tries[0], steps, args.repeats)
        for name, asked in {**ORDINARY, **LARGE}.items()
        if not args.only or name in args.only
    }
    ordinary = [row for name, row in rows.items() if name in ORDINARY]
    findings = {
        "geometry": f"{geometry}, vocabulary 262,144, canvas 256, float32",
        "trie_s": round(trie_s, 2),
        "ordinary": {
            "median_ratio": statistics.median(row["ratio"] for row in ordinary) if ordinary else None,
            "most_compile_s": max((row["compile_s"] for row in ordinary), default=None),
        },
        "constraints": rows,
    }
    record.write("constraint_cost", findings, args.suffix)


if __name__ == "__main__":
    main()
