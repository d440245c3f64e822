"""Typos in held-out text, mended in place, beside writing the whole text anew.

    python -m benchmarks.edit [--lines N] [--seed S] [--suffix=-name]

A line is 24 tokens of a held-out text after up to 96 others, with one to three words
spoilt: a letter replaced, inserted or left out. `edit` finds and mends them. `anew` writes the whole line
again from noise, with the same weights and sampler, shown the spoilt line by the chat template.
`seed_canvas` takes the spoilt line as the first canvas and denoises it to its end. Mended: the word is as
it was written. Altered: of the tokens that were right, those that are no longer there. Forwards: denoise
forwards.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import random
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.held_out_text import CORPUS, passages
from dgemma import LanguageModel, load
from dgemma.engine.request import PinnedTokens
from dgemma.evaluation.intervals import wilson
from dgemma.tasks.context import canvas_of
from dgemma.tasks.edit import EditOptions, edit
from dgemma.tasks.rounds import drive

WORD = re.compile(r"[a-z]{4,}")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Spoilt:
    before: str
    right: str
    text: str  # with typos
    after: str
    typos: tuple[tuple[str, str, str], ...]  # kind, the word as it was, as it is


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="bundled:text")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help=f"held-out texts (default: {CORPUS})")
    parser.add_argument("--lines", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=24, help="of a line (default: 24)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gain", type=float, default=EditOptions.gain)
    parser.add_argument("--closeness", type=float, default=6.0)
    parser.add_argument("--suspicion", type=float, default=EditOptions.suspicion)
    parser.add_argument("--no-spellings", action="store_true", help="only what the model itself reads")
    parser.add_argument("--no-anew", action="store_true", help="only edit")
    parser.add_argument("--suffix", default="")
    args = parser.parse_args()
    lm = load(args.model, dtype="float32")
    options = EditOptions(
        gain=args.gain, closeness=args.closeness, suspicion=args.suspicion, spellings=not args.no_spellings
    )
    rows: dict[str, list[dict[str, Any]]] = {"edit": [], "anew": [], "seed_canvas": []}
    for number, line in enumerate(spoilt_lines(lm, args.lines, args.tokens, args.seed, args.corpus), start=1):
        began = time.perf_counter()
        bench = lm._task_context(seed=number)
        found = drive(edit(bench, line.text, "", options, before=line.before, after=line.after), lm._ask)
        rows["edit"].append(judged(lm, line, found.text, found.forwards, time.perf_counter() - began))
        if not args.no_anew:
            for name, write in (("anew", written_anew), ("seed_canvas", from_seed_canvas)):
                began = time.perf_counter()
                text, forwards = write(lm, line, number)
                rows[name].append(judged(lm, line, text, forwards, time.perf_counter() - began))
        if number % 10 == 0:
            print(number, {name: summary(own) for name, own in rows.items() if own}, flush=True)
    findings = {
        "lines": args.lines,
        "options": dataclasses.asdict(options),
        **{name: summary(own) for name, own in rows.items() if own},
    }
    record.write("edit", findings, args.suffix)


def spoilt_lines(lm: LanguageModel, count: int, num_tokens: int, seed: int, corpus: Path) -> list[Spoilt]:
    rng = random.Random(seed)
    decode = lm.tokenizer.decode
    found: list[Spoilt] = []
    for passage in passages(
        lm.tokenizer, [num_tokens] * count * 3, before=96, after=32, seed=seed, corpus=corpus
    ):
        right = decode(passage.inside)
        words = [match for match in WORD.finditer(right) if match.end() < len(right)]
        if not words or len(found) == count:
            continue
        chosen = sorted(rng.sample(words, min(rng.randint(1, 3), len(words))), key=lambda m: m.start())
        text, typos, at = "", [], 0
        for match in chosen:
            kind, bad = spoil(match.group(), rng)
            text += right[at : match.start()] + bad
            typos.append((kind, match.group(), bad))
            at = match.end()
        found.append(
            Spoilt(decode(passage.before), right, text + right[at:], decode(passage.after), tuple(typos))
        )
    return found


def spoil(word: str, rng: random.Random) -> tuple[str, str]:
    kind = rng.choice(("substitution", "insertion", "deletion"))
    at, letter = rng.randrange(len(word)), rng.choice(LETTERS)
    while letter == word[at]:
        letter = rng.choice(LETTERS)
    if kind == "substitution":
        return kind, word[:at] + letter + word[at + 1 :]
    if kind == "insertion":
        return kind, word[:at] + letter + word[at:]
    return kind, word[:at] + word[at + 1 :]


def written_anew(lm: LanguageModel, line: Spoilt, seed: int) -> tuple[str, int]:
    """The line asked for in a chat that shows it, written on a canvas of noise."""
    bench = lm._task_context(seed=seed)
    asked = f"Write this text again without its typos.\n\n{line.text}"
    prompt = tuple(lm.chat_template.render([{"role": "user", "content": asked}]))
    (answer,) = lm._ask([bench.answer(prompt, max_tokens=bench.canvas_len)])
    return answer.text, answer.forwards


def from_seed_canvas(lm: LanguageModel, line: Spoilt, seed: int) -> tuple[str, int]:
    """The spoilt line as the first canvas, all of it free, what follows pinned after it."""
    bench = lm._task_context(seed=seed)
    old, after = lm.tokenizer.encode(line.text), lm.tokenizer.encode(line.after)
    old = old[: bench.canvas_len]
    pinned = canvas_of(len(old), after, bench.end_token, bench.canvas_len).fixed
    prompt = bench.opening(lm.tokenizer.encode(line.before), reserve=bench.canvas_len)
    given = PinnedTokens(begin=dict(enumerate(old)), fixed=pinned)
    (answer,) = lm._ask([bench.write(prompt, max_tokens=bench.canvas_len, pinned=given)])
    return lm.tokenizer.decode(answer.tokens[: len(old)]), answer.forwards


def judged(lm: LanguageModel, line: Spoilt, text: str, forwards: int, seconds: float) -> dict[str, Any]:
    """What became of the typos, and of the tokens that were right."""
    encode = lm.tokenizer.encode
    right, spoilt, now = encode(line.right), encode(line.text), encode(text)
    kept = sum(
        block.size for block in difflib.SequenceMatcher(None, right, spoilt, False).get_matching_blocks()
    )
    # Tokens that were right before and are not any more: of those shared with the true line, the lost ones.
    shared = [
        at
        for block in difflib.SequenceMatcher(None, right, spoilt, False).get_matching_blocks()
        for at in range(block.a, block.a + block.size)
    ]
    still = {
        at
        for block in difflib.SequenceMatcher(None, right, now, False).get_matching_blocks()
        for at in range(block.a, block.a + block.size)
    }
    words = WORD.findall(text)
    mended: dict[str, list[bool]] = {}
    for kind, was, is_now in line.typos:
        before = WORD.findall(line.text).count(was)
        good = words.count(was) > before and (
            is_now not in words or WORD.findall(line.right).count(is_now) > 0
        )
        mended.setdefault(kind, []).append(good)
    return {
        "mended": mended,
        "untouched": kept,
        "altered": sum(at not in still for at in shared),
        "forwards": forwards,
        "seconds": seconds,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = ("substitution", "insertion", "deletion")
    by_kind = {kind: [good for row in rows for good in row["mended"].get(kind, ())] for kind in kinds}
    every = [good for own in by_kind.values() for good in own]
    untouched = sum(row["untouched"] for row in rows)
    seconds = sorted(row["seconds"] for row in rows)
    return {
        "typos": len(every),
        "mended": round(sum(every) / max(1, len(every)), 3),
        "mended_interval": dataclasses.asdict(wilson(sum(every), len(every))),
        "mended_by_kind": {kind: round(sum(own) / max(1, len(own)), 3) for kind, own in by_kind.items()},
        "altered_share_of_untouched_tokens": round(
            sum(row["altered"] for row in rows) / max(1, untouched), 5
        ),
        "untouched_tokens": untouched,
        "forwards_per_line": round(statistics.fmean(row["forwards"] for row in rows), 2),
        "milliseconds_median": round(1e3 * statistics.median(seconds)),
    }


if __name__ == "__main__":
    main()
