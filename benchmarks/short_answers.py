"""Short answers on short canvases, beside the same answers on the model's own: time, and what is right.

    python -m benchmarks.short_answers           (--messages N, --questions N, --puzzles N, --rounds N)

All ways on each example in turn; the ratio is that of the processor's seconds of this process, full canvas by
way, with its quartiles; the wall's beside it. "auto" is canvas_len="auto"; a number is a canvas of that many.

speed: random weights of the presets small (hidden size 256) and medium (1024, and the released vocabulary), a
canvas of 256, 12 steps on each canvas, whatever it holds. What random weights write means nothing.
forms: `bundled:forms` (128 positions) writes the first fields of a record, in compact JSON or as a form,
whichever it likes, under a schema that allows no others; a record counts if all fields are right.
text: `bundled:text` (32 positions) answers a question about a scene with one of four words: by a choice of
four whole answers, and by reading the word's place, as `lm.decide` does.
sudoku: `bundled:sudoku` (91 positions, all of which are the answer) writes its grid in pieces.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from benchmarks import record
from benchmarks.decide import Asked, questions_about
from dgemma import LanguageModel, load
from dgemma.checkpoint.presets import PRESETS
from dgemma.evaluation.intervals import wilson
from dgemma.evaluation.tasks.sudoku import SudokuTask
from dgemma.events import Answer
from dgemma.forms.record_types import grounded, record_schema
from dgemma.model.transformer import Transformer
from dgemma.tasks.rounds import drive
from dgemma.tasks.slots import Part, Slot, read_slots
from recipes.forms.messages import Message, make_message

Ways = dict[str, Callable[[], tuple[bool, Any]]]
"""-> whether the answer is right, and the answer."""

LENGTHS = (8, 16, 32, 64)
# The first fields of a record, with a canvas that holds them in nearly all records.
FIELDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "log": (16, ("level",)),
    "appointment": (24, ("title",)),
    "order": (24, ("customer",)),
    "measurement": (40, ("sensor", "quantity")),
    "contact": (64, ("name", "company", "email")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--messages", type=int, default=30, help="of each kind of record (default: 30)")
    parser.add_argument("--questions", type=int, default=60, help="(default: 60)")
    parser.add_argument("--puzzles", type=int, default=20, help="(default: 20)")
    parser.add_argument("--rounds", type=int, default=5, help="of the speed alone (default: 5)")
    parser.add_argument("--suffix", default="", help="of the result file's name")
    args = parser.parse_args()
    findings: dict[str, Any] = {}
    for name, measure, count in (
        ("speed", speed, args.rounds),
        ("forms", forms, args.messages),
        ("text", text, args.questions),
        ("sudoku", sudoku, args.puzzles),
    ):
        if count:
            findings[name] = measure(count)
    record.write("short_answers", findings, args.suffix)


@dataclass
class Tally:
    """What one way took and found. The first example warms up, and is not counted."""

    right: list[bool] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def add(self, way: Callable[[], tuple[bool, Any]]) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        is_right, found = way()
        self.cpu_s.append(time.process_time() - cpu)
        self.wall_s.append(time.perf_counter() - wall)
        self.right.append(is_right)
        if isinstance(found, Answer):
            self.tokens.append(len(found.tokens))
            self.steps.append(sum(found.steps))
        return found


def compare(examples: Sequence[Ways], what: str, *, is_judged: bool = True) -> dict[str, Any]:
    """All ways on each example, the first of them the full canvas."""
    names = list(examples[0])
    tallies = {name: Tally() for name in names}
    same = dict.fromkeys(names, 0)
    for way in examples[0].values():
        way()
    for number, ways in enumerate(examples):
        found = {}
        for at in range(len(names)):
            name = names[(number + at) % len(names)]
            found[name] = tallies[name].add(ways[name])
        for name in names:
            same[name] += content(found[name]) == content(found[names[0]])
    rows = {}
    for name, tally in tallies.items():
        rows[name] = {
            "cpu_times_faster": ratios(tallies[names[0]].cpu_s, tally.cpu_s),
            "wall_times_faster": ratios(tallies[names[0]].wall_s, tally.wall_s),
            "cpu_s": round(statistics.median(tally.cpu_s), 4),
            "wall_s": round(statistics.median(tally.wall_s), 4),
            "same_as_full": same[name],
        }
        if tally.tokens:
            rows[name]["tokens"] = round(statistics.mean(tally.tokens), 1)
            rows[name]["steps"] = round(statistics.mean(tally.steps), 2)
        if is_judged:
            interval = asdict(wilson(sum(tally.right), len(tally.right)))
            rows[name] |= {"right": sum(tally.right) / len(tally.right), "right_interval": interval}
        print(what, name, rows[name], flush=True)
    return {"examples": len(examples), "ways": rows}


def ratios(full: Sequence[float], way: Sequence[float]) -> list[float]:
    """Quartiles of how many times faster."""
    values = [a / b for a, b in zip(full, way, strict=True)]
    return [round(value, 2) for value in statistics.quantiles(values, n=4)]


def content(found: Any) -> Any:
    return found.tokens if isinstance(found, Answer) else found


def speed(rounds: int) -> dict[str, Any]:
    one_by_one = [(length, 1) for length in LENGTHS]
    return {
        "small": speed_of("small", [*one_by_one, (16, 8)], rounds),
        "medium": speed_of("medium", one_by_one, min(rounds, 3)),  # half a minute per answer
    }


def speed_of(preset: str, cases: Sequence[tuple[int, int]], rounds: int) -> dict[str, Any]:
    """A canvas of 256 on random weights: the text has no meaning, and does not end by itself."""
    config = replace(PRESETS[preset].config, canvas_len=256)
    torch.manual_seed(0)
    transformer = Transformer(config, dtype=torch.float32, device="cpu")
    for tensor in (*transformer.parameters(), *transformer.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_(0, 0.02)
    lm = LanguageModel(transformer)
    prompt = [5] * 64

    def written(num_tokens: int, at_once: int, **options: Any) -> Callable[[], tuple[bool, Any]]:
        def write() -> tuple[bool, Any]:
            options_ = {"max_denoising_steps": 12, "confidence_threshold": 0.0, "ignore_end": True, **options}
            return True, lm.generate([prompt] * at_once, max_tokens=num_tokens, seed=1, **options_)[0]

        return write

    found = {}
    for num_tokens, at_once in cases:
        ways = {
            "full": written(num_tokens, at_once),
            "auto": written(num_tokens, at_once, canvas_len="auto"),
        }
        name = f"{num_tokens} tokens, {at_once} at once"
        found[name] = compare([ways] * rounds, f"speed, {preset}, {name}", is_judged=False)
    return {"hidden": config.hidden_size, "vocabulary": config.vocab_size, "canvas": 256, "tokens": found}


def forms(count: int) -> dict[str, Any]:
    lm = load("bundled:forms", dtype="float32")
    messages = {kind: messages_of(kind, count) for kind in FIELDS}
    found = {}
    for kind, (canvas_len, keys) in FIELDS.items():
        examples = [
            {
                "full": partly_extracted(lm, message, keys),
                str(canvas_len): partly_extracted(lm, message, keys, canvas_len=canvas_len),
                "auto": partly_extracted(lm, message, keys, canvas_len="auto"),
                f"auto, max_tokens {canvas_len}": partly_extracted(
                    lm, message, keys, canvas_len="auto", max_tokens=canvas_len
                ),
            }
            for message in messages[kind]
        ]
        found[f"{kind}: {', '.join(keys)}"] = compare(examples, f"forms {kind}")
    examples = [
        {"full": extracted(lm, message), "auto": extracted(lm, message, canvas_len="auto")}
        for kind in FIELDS
        for message in messages[kind][: max(2, count // 2)]
    ]
    found["whole records, free"] = compare(examples, "forms whole")
    return found


def messages_of(kind: str, count: int) -> list[Message]:
    found: list[Message] = []
    number = 0
    while len(found) < count:
        message = make_message("values", number, seed=1)
        if message.type == kind and message.is_typed:
            found.append(message)
        number += 1
    return found


def partly_extracted(
    lm: LanguageModel, message: Message, keys: Sequence[str], **options: Any
) -> Callable[[], tuple[bool, Any]]:
    whole = grounded(record_schema(message.type), message.text)
    properties = {key: whole["properties"][key] for key in keys}
    schema = {**whole, "properties": properties, "required": list(keys)}
    expected = {key: message.expected[key] for key in keys}

    def write() -> tuple[bool, Any]:
        answer = lm.chat(message.prompt, json_schema=schema, seed=0, **options)
        return is_json(answer.text, expected), answer

    write()  # the schema is compiled now
    return write


def extracted(lm: LanguageModel, message: Message, **options: Any) -> Callable[[], tuple[bool, Any]]:
    def write() -> tuple[bool, Any]:
        answer = lm.chat(message.prompt, seed=0, **options)
        return is_json(answer.text, message.expected), answer

    return write


def is_json(written: str, expected: Mapping[str, Any]) -> bool:
    try:
        found: Any = json.loads(written)
    except ValueError:
        return False
    return bool(found == expected)


def text(count: int) -> dict[str, Any]:
    lm = load("bundled:text", dtype="float32")
    asked = [question for question, _ in zip(questions_about(set()), range(count), strict=False)]
    options: Mapping[str, dict[str, Any]] = {"full": {}, "auto": {"canvas_len": "auto"}}
    decided = [
        {n: decision(lm, one, number, **o) for n, o in options.items()} for number, one in enumerate(asked)
    ]
    chosen = [
        {n: choice(lm, one, number, **o) for n, o in options.items()} for number, one in enumerate(asked)
    ]
    return {"decide": compare(decided, "decide"), "choice": compare(chosen, "choice")}


def decision(lm: LanguageModel, one: Asked, seed: int, **options: Any) -> Callable[[], tuple[bool, Any]]:
    """The likeliest word in the answer's place."""
    encode = lm.tokenizer.encode
    prompt = tuple(lm.chat_template.render([{"role": "user", "content": f"{one.scene} {one.question}"}]))
    words = Slot(tuple(tuple(encode(f" {word}")) for word in one.choices))
    parts: list[Part] = [tuple(encode(one.before)), words, tuple(encode(one.after))]

    def decide() -> tuple[bool, Any]:
        task = lm._task_context(seed=seed, **options)
        read = drive(read_slots(task, prompt, parts, steps=1, draws=4), lm._ask)
        shares = read.probabilities[0]
        best = max(range(len(shares)), key=lambda at: shares[at])
        return best == one.right, best

    return decide


def choice(lm: LanguageModel, one: Asked, seed: int, **options: Any) -> Callable[[], tuple[bool, Any]]:
    """One of four whole answers, by constraint."""
    answers = [f"{one.before} {word}{one.after}" for word in one.choices]

    def choose() -> tuple[bool, Any]:
        found = lm.chat(f"{one.scene} {one.question}", choice=answers, seed=seed, **options)
        return found.text == answers[one.right], found

    choose()  # the choice is compiled now
    return choose


def sudoku(count: int) -> dict[str, Any]:
    lm, task = load("bundled:sudoku", dtype="float32"), SudokuTask("medium")

    def solved(number: int, **options: Any) -> Callable[[], tuple[bool, Any]]:
        puzzle = task.examples()[number]

        def solve() -> tuple[bool, Any]:
            answer = lm.generate(task.prompt(puzzle), seed=0, **task.options(), **options)
            return task.score(puzzle, answer)["exact"] == 1, answer

        return solve

    examples = [
        {
            "full": solved(number),
            "60": solved(number, canvas_len=60),
            "30": solved(number, canvas_len=30),
            "10": solved(number, canvas_len=10),
            "auto": solved(number, canvas_len="auto"),
        }
        for number in range(count)
    ]
    return compare(examples, "sudoku")


if __name__ == "__main__":
    main()
