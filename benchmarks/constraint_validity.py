"""Does every constrained answer parse? Many constraints, many generations, each text checked by other tools.

    python -m benchmarks.constraint_validity                      (about 21,000 generations)
    python -m benchmarks.constraint_validity --each 4 --fresh 50  (a short run)

Constraints are those of the tests: written schemas and regular expressions, the part of the public
JSON-Schema-Test-Suite that is taken, and schemas and expressions that hypothesis makes up anew in each run.
Models: random weights with canvases of 8 and of 32 tokens, and the bundled text model. Lengths: the fewest
tokens that suffice, one more, and several canvases. Texts are read by `json` and `jsonschema`, or by `re`;
one token less than the shortest text must be refused before anything runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from jsonschema import Draft202012Validator

import dgemma
from benchmarks import record
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.engine.request import EngineRequest
from dgemma.errors import InputError
from dgemma.events import FinishReason
from dgemma.language_model import LanguageModel
from dgemma.params import GenerationParams
from dgemma.structured_output.compiler import GrammarCompiler
from dgemma.structured_output.response_format import JsonFormat, RegexFormat, ResponseFormat

TESTS = Path(__file__).parent.parent / "tests"
MODELS = {"random, canvas 8": 8, "random, canvas 32": 32, "bundled:text": None}
REGEXES = [
    r"yes|no", r"[a-z]+", r"\d{4}-\d\d-\d\d", r"(\w+ ){3,9}\w+\.", r"[A-Z]{2}\d{2}( ?\d{4}){4}",
    r"#[0-9a-f]{6}",
    r"(?:[0-9]{1,3}\.){3}[0-9]{1,3}", r"\+?\d{1,3} \(\d{3}\) \d{3}-\d{4}", r"<b>[^<>]*</b>", r"(a|b)*abb",
    r"[äöüß€😀]{1,9}", r"\s*\S+\s*", r".*", r".{17}", r"(ab|abc|b)*c{9}", r"[^a-zA-Z]+", r"x{0,200}y",
    r"- \[[ x]\] .{1,40}(\n- \[[ x]\] .{1,40}){2}", r"def \w+\((\w+(, \w+)*)?\):\n    return .+",
    r"(?P<key>[a-z]+)=(?P<value>[^;\n]+);", r"[01]{64}", r"\u0041\x42\t?", r"(([a-f]\d){2}|z){3}",
]  # fmt: skip


@dataclass(frozen=True)
class ConstraintCase:
    """A constraint, and where it is from."""

    response_format: ResponseFormat
    origin: str


@dataclass(frozen=True)
class Task:
    model: str
    cases: tuple[ConstraintCase, ...]
    each: int
    seed: int


def written() -> list[ConstraintCase]:
    with (TESTS / "data" / "json_schemas.jsonl").open(encoding="utf-8") as lines:
        schemas = [json.loads(line)["schema"] for line in lines]
    return [ConstraintCase(JsonFormat(json.dumps(schema)), "written schema") for schema in schemas] + [
        ConstraintCase(RegexFormat(pattern), "written regex") for pattern in REGEXES
    ]


def public() -> list[ConstraintCase]:
    from json_schema_suite import groups

    return [ConstraintCase(JsonFormat(json.dumps(group.schema)), "public suite") for group in groups()]


def fresh(count: int, own_seed: int) -> list[ConstraintCase]:
    """Made up by hypothesis."""
    from constraint.test_pattern import PATTERNS
    from constraint.test_random_schemas import SCHEMAS

    found: dict[ResponseFormat, str] = {}

    def collect(strategy: Any, make: Any, origin: str, most: int) -> None:
        @seed(own_seed)
        @settings(
            max_examples=most, phases=[Phase.generate], database=None, deadline=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(strategy)
        def take(value: Any) -> None:
            found[make(value)] = origin

        take()

    collect(SCHEMAS, lambda schema: JsonFormat(json.dumps(schema)), "hypothesis schema", count)
    collect(PATTERNS, RegexFormat, "hypothesis regex", count // 4)
    return [ConstraintCase(response_format, origin) for response_format, origin in found.items()]


@cache
def model(name: str) -> tuple[LanguageModel, GrammarCompiler]:
    torch.set_num_threads(1)
    canvas_len = MODELS[name]
    if canvas_len is None:
        lm = dgemma.load(name, dtype="float32")
    else:
        path = Path(tempfile.mkdtemp()) / "tiny"
        write_random(
            path, replace(PRESETS["tiny"].config, canvas_len=canvas_len), dtype="F32", seed=canvas_len
        )
        lm = dgemma.load(path)
    return lm, GrammarCompiler(lm.tokenizer, lm.config.vocab_size, (1, 106))


def is_right(response_format: ResponseFormat, text: str) -> bool:
    if isinstance(response_format, RegexFormat):
        return re.fullmatch(response_format.pattern, text) is not None
    assert isinstance(response_format, JsonFormat)
    schema = json.loads(response_format.schema or "true")
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).is_valid(value)


def run(task: Task) -> dict[str, Any]:
    """-> counts, and what went wrong."""
    lm, compiler = model(task.model)
    rng = random.Random(task.seed)
    counts: Counter[str] = Counter()
    wrong: list[dict[str, str]] = []
    requests: list[EngineRequest] = []
    request_cases: list[ConstraintCase] = []
    for case in task.cases:
        try:
            constraint = compiler.compile(case.response_format)
        except InputError:
            counts[f"refused, {case.origin}"] += 1
            continue
        counts[f"constraints, {case.origin}"] += 1
        shortest = int(constraint.token_dfa.distance[0])
        lengths = [max(1, shortest), shortest + 1, shortest + lm.config.canvas_len + 3, 3 * shortest + 70]
        base = GenerationParams.make(lm.generation_defaults, end_tokens=(1, 106))
        if shortest > 1:
            few = replace(base, max_tokens=shortest - 1)
            try:
                lm._ask([EngineRequest(prompt=(2, 9), seed=0, params=few, constraint=constraint)])
                wrong.append({"form": str(case.response_format), "text": "too few tokens were not refused"})
            except InputError:
                counts["too short, refused"] += 1
        for number in range(task.each):
            params = replace(
                base,
                max_tokens=lengths[number % 4],
                max_denoising_steps=rng.randint(1, 4),
                temperature=rng.choice([0.0, 1.0, 1.0, 2.0]),
                decode="causal" if rng.random() < 0.1 else "diffuse",
            )
            prompt = tuple(rng.randrange(6, lm.config.vocab_size) for _ in range(rng.randint(1, 30)))
            requests.append(
                EngineRequest(
                    prompt=prompt, seed=rng.randrange(1 << 60), params=params, constraint=constraint
                )
            )
            request_cases.append(case)
    for request, case, answer in zip(requests, request_cases, lm._ask(requests), strict=True):
        counts[f"generations, {task.model}"] += 1
        counts["over a canvas border"] += len(answer.tokens) > lm.config.canvas_len
        is_whole = answer.finish_reason is FinishReason.STOP
        if (
            not is_right(case.response_format, answer.text)
            or not is_whole
            or len(answer.tokens) > (request.params.max_tokens or 0)
        ):
            wrong.append({"form": str(case.response_format), "model": task.model, "text": answer.text})
    return {"counts": counts, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--each", type=int, default=16, help="generations of a constraint and random model")
    parser.add_argument("--fresh", type=int, default=200, help="schemas that hypothesis makes up")
    parser.add_argument("--seed", type=int, help="of all that is random; by default a new one")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="constraints whose origin has this in its name")
    parser.add_argument("--suffix", default="", help="of the result file")
    args = parser.parse_args()
    own_seed = int.from_bytes(os.urandom(4)) if args.seed is None else args.seed
    cases = [*written(), *public(), *fresh(args.fresh, own_seed)]
    cases = [one for one in cases if args.only in one.origin]
    size = 6
    each = {name: args.each if canvas_len else max(1, args.each // 4) for name, canvas_len in MODELS.items()}
    tasks = [
        Task(name, tuple(cases[at : at + size]), each[name], own_seed + at)
        for at in range(0, len(cases), size)
        for name in MODELS
    ]
    random.Random(own_seed).shuffle(tasks)
    counts: Counter[str] = Counter()
    wrong: list[dict[str, str]] = []
    begin = time.monotonic()
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        for done, found in enumerate(pool.map(run, tasks), 1):
            counts += found["counts"]
            wrong += found["wrong"]
            total = sum(n for name, n in counts.items() if name.startswith("generations"))
            seconds = time.monotonic() - begin
            print(
                f"{done}/{len(tasks)} tasks, {total} generations, {len(wrong)} wrong, {seconds:.0f} s",
                flush=True,
            )
    total = sum(n for name, n in counts.items() if name.startswith("generations"))
    kinds = len(MODELS)
    findings = {
        "seed": own_seed,
        "generations": total,
        "wrong": len(wrong),
        "first_wrong": wrong[:20],
        "constraints": {
            name.partition(", ")[2]: n // kinds
            for name, n in sorted(counts.items())
            if name.startswith("constraints")
        },
        "refused_by_name": {
            name.partition(", ")[2]: n // kinds
            for name, n in sorted(counts.items())
            if name.startswith("refused")
        },
        "by_model": {
            name.partition(", ")[2]: n for name, n in sorted(counts.items()) if name.startswith("generations")
        },
        "over_a_canvas_border": counts["over a canvas border"],
        "too_short_refused": counts["too short, refused"],
        "seconds": round(time.monotonic() - begin),
    }
    record.write("constraint_validity", findings, args.suffix)


sys.path.insert(0, str(TESTS))

if __name__ == "__main__":
    main()
