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
from dgemma.engine.constraint_state import ConstraintState
from dgemma.engine.model_runner import sample_step
from dgemma.language_model import LanguageModel
from dgemma.params import GenerationParams
from dgemma.sampling.rng import NoiseStream, noise_key, random_tokens
from dgemma.sampling.sampler import make_sampler, open_canvas
from dgemma.structured_output.budget import TimeBudget
from dgemma.structured_output.constraint import Constraint
from dgemma.structured_output.dfa import build_dfa
from dgemma.structured_output.json_schema.grammar import json_object_grammar, schema_grammar
from dgemma.structured_output.json_schema.syntax import JsonSyntax
from dgemma.structured_output.regex import Alternation, Concat, Node, Repeat, SpecialToken, parse
from dgemma.structured_output.token_dfa import TokenTrie, build_token_dfa

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


def read_words(path: Path) -> TokenTrie:
    """The trie of a sentencepiece vocabulary."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokens: list[bytes | None] = []
    for id_ in range(model.get_piece_size()):
        token = model.id_to_piece(id_)
        if model.is_byte(id_):
            tokens.append(bytes([int(token[3:5], 16)]))
        elif model.is_control(id_) or model.is_unknown(id_) or id_ in END_TOKENS:
            tokens.append(None)
        else:
            tokens.append(token.replace("▁", " ").encode())
    return TokenTrie.of(tokens)


def pattern_of(response_format: Any, budget: TimeBudget) -> Node:
    if isinstance(response_format, str):
        return parse(response_format)
    return (
        json_object_grammar(JsonSyntax())
        if response_format is None
        else schema_grammar(response_format, JsonSyntax(), budget=budget)
    )


def compiled(response_format: Any, trie: TokenTrie, seconds: float = 10.0) -> Constraint:
    budget = TimeBudget(seconds)
    ends = Repeat(Alternation(tuple(map(SpecialToken, END_TOKENS))), 0, None)
    token_dfa = build_token_dfa(
        build_dfa(Concat((pattern_of(response_format, budget), ends)), budget), trie, budget
    )
    return Constraint(token_dfa=token_dfa, end_tokens=END_TOKENS)


def seconds(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


class Steps:
    """Whole steps of one canvas: forward, look at the vocabulary, next canvas."""

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm
        self.params = GenerationParams()
        self.sampler = make_sampler(self.params)
        self.cache = lm.new_cache(1)
        config = lm.config
        lm.encode(torch.randint(config.vocab_size, (1, 64)), self.cache)
        place = noise_key([1], [0], [0], CPU)
        self.state = open_canvas(random_tokens(place, NoiseStream.OPEN, config.canvas_len, config.vocab_size))
        self.soft = torch.zeros(
            1, config.canvas_len, config.hidden_size, dtype=lm.transformer.embedding.dtype
        )

    def take(self, constraint: Constraint | None) -> None:
        canvas_len = self.lm.config.canvas_len
        hidden = self.lm.denoise(self.state.canvas, self.cache, self.soft)
        strings = None
        if constraint is not None:
            strings = [
                ConstraintState(constraint, 4 * canvas_len, None).canvas_constraint(0, canvas_len, CPU)
            ]
        place = noise_key([1], [0], [1], CPU)
        sample_step(
            self.lm.transformer, self.state, hidden, place, self.sampler, self.params, None, None, strings
        )


def measure(name: str, response_format: Any, trie: TokenTrie, steps: Steps, repeats: int) -> dict[str, Any]:
    found: list[Constraint] = []
    compile_s = seconds(lambda: found.append(compiled(response_format, trie)))
    constraint, dfa = found[0], found[0].token_dfa
    steps.take(constraint)
    ratios, free, bound = [], [], []
    for _ in range(repeats):
        free.append(seconds(lambda: steps.take(None)))
        bound.append(seconds(lambda: steps.take(constraint)))
        ratios.append(bound[-1] / free[-1])
    row = {
        "compile_s": round(compile_s, 3),
        "states": dfa.num_states,
        "classes": dfa.num_classes,
        "arrows": int((dfa.transitions >= 0).sum()),
        "words": int((dfa.class_of_token > 0).sum()),
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
    lm.transformer.float()
    tries: list[TokenTrie] = []
    trie_s = seconds(lambda: tries.append(read_words(args.tokenizer)))
    steps = Steps(lm)
    steps.take(None)
    rows = {
        name: measure(name, response_format, tries[0], steps, args.repeats)
        for name, response_format in {**ORDINARY, **LARGE}.items()
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
