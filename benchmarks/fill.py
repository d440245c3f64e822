"""Gaps of held-out text, filled: by length choice, at the true length, and left to right from the prefix.

    python -m benchmarks.fill [--per-length N] [--seed S] [--suffix=-name]

Gaps begin and end where tokens do, with up to 128 tokens before them and 60 after. `fill` does not know how
long the gap is, nor does `canvases`, which is `fill` without drafts; `true_length` does; `left_to_right`
decodes the true number of tokens greedily, and sees nothing after the gap. Exact: every token right.
Likelihood: nats per token of the gap and 24 tokens after it in causal mode, beside the true text's.
`--cuts`: gaps cut at any character, with and without healing.
`--prompted`: the gap asked for through the chat template.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.held_out_text import CORPUS, Passage, passages
from dgemma import LanguageModel, load
from dgemma.evaluation.intervals import paired_difference, wilson
from dgemma.tasks.borders import Borders
from dgemma.tasks.infill import Filled, FillOptions, fill_between
from dgemma.tasks.rounds import drive

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
SHORT = 6
BEFORE, AFTER, SCORED = 128, 60, 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="bundled:text")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help=f"held-out texts (default: {CORPUS})")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=LENGTHS, help=f"tokens (default: {LENGTHS})"
    )
    parser.add_argument("--per-length", type=int, default=20)
    parser.add_argument("--short", type=int, default=3, help="times as many gaps of 1 to 3 tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cuts", type=int, default=0, help="so many gaps cut at any character")
    parser.add_argument("--prompted", type=int, default=0, help="so many gaps asked for by a prompt")
    parser.add_argument("--suffix", default="")
    args = parser.parse_args()
    lm = load(args.model, dtype="float32")
    lengths = [n for n in args.lengths for _ in range(args.per_length * (args.short if n <= 3 else 1))]
    rows: list[dict[str, Any]] = []
    for number, passage in enumerate(
        passages(lm.tokenizer, lengths, before=BEFORE, after=AFTER, seed=args.seed, corpus=args.corpus),
        start=1,
    ):
        rows.append(one_gap(lm, passage, number))
        print(f"{number} of {len(lengths)}: {rows[-1]}", flush=True)
    findings: dict[str, Any] = {
        "gaps": len(rows),
        "by_length": {str(n): summary([r for r in rows if r["length"] == n]) for n in args.lengths},
        f"up_to_{SHORT}": summary([r for r in rows if r["length"] <= SHORT]),
        "all": summary(rows),
        "length_choice_where_true_length_is_exact": length_choice(rows),
        "length_choice_of_all": length_choice(rows, every=True),
    }
    if args.cuts:
        findings["cut_anywhere"] = cut_anywhere(lm, args.cuts, args.seed, args.corpus)
    if args.prompted:
        findings["prompted"] = prompted(lm, args.prompted, args.seed, args.corpus)
    record.write("fill", findings, args.suffix)


def one_gap(lm: LanguageModel, passage: Passage, seed: int) -> dict[str, Any]:
    borders = Borders(before=passage.before, after=passage.after)
    length = len(passage.inside)

    def filled(options: FillOptions) -> tuple[Filled, float]:
        began = time.perf_counter()
        found = drive(fill_between(lm._task_context(seed=seed), borders, options), lm._ask)
        return found, time.perf_counter() - began

    chosen, seconds = filled(FillOptions())
    canvases, _ = filled(FillOptions(drafts=0))
    known, _ = filled(FillOptions(lengths=(length,)))
    bench = lm._task_context(seed=seed)
    context = bench.opening(passage.before, reserve=0)
    greedy = lm.generate(
        context, max_tokens=length, decode="causal", temperature=0.0, ignore_end=True, seed=seed
    ).tokens
    texts = {
        "true": passage.inside,
        "fill": chosen.candidates[0].tokens,
        "canvases": canvases.candidates[0].tokens,
        "true_length": known.candidates[0].tokens,
        "left_to_right": greedy,
    }
    after = passage.after[:SCORED]
    scored = lm._ask([bench.score((*context, *gap, *after), len(context)) for gap in texts.values()])
    return {
        "length": length,
        "chosen": len(texts["fill"]),
        "exact": {name: gap == passage.inside for name, gap in texts.items() if name != "true"},
        "nats": {
            name: sum(answer.scores) / (length + SCORED) for name, answer in zip(texts, scored, strict=True)
        },
        "forwards": chosen.forwards,
        "draft_tokens": chosen.draft_tokens,
        "forwards_true_length": known.forwards,
        "seconds": round(seconds, 3),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    if not rows:
        return {}
    names = ("fill", "canvases", "true_length", "left_to_right")
    seconds = sorted(row["seconds"] for row in rows)
    return {
        "gaps": len(rows),
        "exact": {name: share([r["exact"][name] for r in rows]) for name in names},
        "fill_less_left_to_right": paired_difference(
            [r["exact"]["left_to_right"] for r in rows], [r["exact"]["fill"] for r in rows]
        ).to_json(),
        "nats_per_token": {
            name: round(statistics.fmean(r["nats"][name] for r in rows), 3) for name in ("true", *names)
        },
        "forwards": round(statistics.fmean(r["forwards"] for r in rows), 1),
        "draft_tokens": round(statistics.fmean(r["draft_tokens"] for r in rows), 1),
        "forwards_true_length": round(statistics.fmean(r["forwards_true_length"] for r in rows), 1),
        "milliseconds": {
            "median": round(1e3 * statistics.median(seconds)),
            "smallest": round(1e3 * seconds[0]),
            "largest": round(1e3 * seconds[-1]),
        },
    }


def share(hits: list[bool]) -> list[float]:
    """The mean, and its 95 % interval."""
    ends = wilson(sum(hits), len(hits))
    return [round(number, 3) for number in (sum(hits) / len(hits), ends.low, ends.high)]


def length_choice(rows: list[dict[str, Any]], *, every: bool = False) -> dict[str, Any]:
    some = [row for row in rows if every or row["exact"]["true_length"]]
    apart = [abs(row["chosen"] - row["length"]) for row in some]
    count = max(1, len(some))
    return {
        "gaps": len(some),
        "right": round(sum(n == 0 for n in apart) / count, 3),
        "right_or_within_1": round(sum(n <= 1 for n in apart) / count, 3),
    }


def cut_anywhere(lm: LanguageModel, count: int, seed: int, corpus: Path) -> dict[str, Any]:
    """Gaps of one to four tokens' text, moved by a character or two: exact texts, healed and not."""
    hits = {"healed": 0, "not_healed": 0}
    for number, passage in enumerate(
        passages(
            lm.tokenizer,
            [1, 2, 3, 4] * (count // 4),
            before=BEFORE,
            after=AFTER,
            seed=seed + 1,
            corpus=corpus,
        )
    ):
        before, inside, after = map(lm.tokenizer.decode, (passage.before, passage.inside, passage.after))
        shift = 1 + number % 3
        prefix, gap, suffix = before + inside[:shift], inside[shift:] + after[:shift], after[shift:]
        for name, heal in (("healed", True), ("not_healed", False)):
            found = lm.fill(prefix, suffix, heal=heal, max_tokens=8, seed=number)
            hits[name] += found.text == gap
    return {"gaps": 4 * (count // 4), **{name: round(n / (4 * (count // 4)), 3) for name, n in hits.items()}}


def prompted(lm: LanguageModel, count: int, seed: int, corpus: Path) -> dict[str, Any]:
    """The same gaps asked for through the chat template, closed by the end token."""
    hits = {"lengths": 0, "prompt": 0}
    nats: dict[str, list[float]] = {"lengths": [], "prompt": []}
    for number, passage in enumerate(
        passages(lm.tokenizer, [1, 2, 3, 4] * (count // 4), before=48, after=48, seed=seed + 2, corpus=corpus)
    ):
        before, inside, after = map(lm.tokenizer.decode, (passage.before, passage.inside, passage.after))
        for name in ("lengths", "prompt"):
            found = lm.fill(before, after, method=name, max_tokens=8, seed=number, heal=False)
            hits[name] += found.text == inside
            if found.candidates:
                nats[name].append(found.candidates[0].per_token)
    rows = 4 * (count // 4)
    return {
        "gaps": rows,
        "exact": {name: round(n / rows, 3) for name, n in hits.items()},
        "nats_per_token": {name: round(statistics.fmean(own), 3) for name, own in nats.items()},
    }


if __name__ == "__main__":
    main()
