"""Ways to decode at equal weights: left to right, lossless, verified, diffusion; speed and quality.

    python -m benchmarks.decoding [MODEL]      (--prompts N; --tokens N; --temperature T; --draft-steps N ...)

Prompts are the beginnings of held-out passages; of a model that was trained on records, held-out messages.
All ways answer each prompt in turn, so that whatever else the machine does falls on all of them. Likelihood
is that of the causal pass.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks import record
from benchmarks.held_out_text import passages
from benchmarks.lossless import form_prompts
from dgemma.evaluation.likelihood import TokenPair, log_likelihoods
from dgemma.events import Answer
from dgemma.language_model import LanguageModel
from dgemma.loading import load

WAYS: dict[str, dict[str, Any]] = {
    "causal": {"decode": "causal"},
    "lossless": {"decode": "lossless"},
    "verified 0.3": {"decode": "verified", "verify_threshold": 0.3},
    "verified 0.1": {"decode": "verified", "verify_threshold": 0.1},
    "verified 0.03": {"decode": "verified", "verify_threshold": 0.03},
    "diffuse, fast": {"decode": "diffuse", "preset": "fast"},
    "diffuse, balanced": {"decode": "diffuse"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="bundled:text")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--draft-steps", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--suffix", default="", help="of the result file's name")
    args = parser.parse_args()
    lm = load(args.model)
    if lm.record_types is not None:
        prompts = list(form_prompts(lm, args.prompts))
    else:
        found = passages(lm.tokenizer, [1] * args.prompts, before=64, after=1, seed=3)
        prompts = [list(passage.before) for passage in found]
    # Texts end where they end: after that a model repeats itself, and any draft of repetitions is accepted.
    common = {"max_tokens": args.tokens, "temperature": args.temperature}
    ways: dict[str, dict[str, Any]] = {}
    for name, options in WAYS.items():
        if options["decode"] in ("lossless", "verified"):
            for steps in args.draft_steps:
                ways[f"{name}, {steps} steps"] = {**options, "draft_steps": steps}
        else:
            ways[name] = options
    tallies = {name: Tally() for name in ways}
    for options in ways.values():  # first use is not counted
        lm.generate(prompts[0], seed=0, **{**common, **options, "max_tokens": 8})
    for number, prompt in enumerate(prompts):
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began = time.perf_counter()
            answer = lm.generate(prompt, seed=number, **{**common, **ways[name]})
            tallies[name].add(prompt, answer, time.perf_counter() - began)
        print(f"{number + 1} of {len(prompts)} prompts", file=sys.stderr, flush=True)
    causal = tallies["causal"]
    findings: dict[str, Any] = {"model": args.model, "prompts": args.prompts, "tokens": args.tokens}
    for name, tally in tallies.items():
        findings[name] = tally.summary(lm, causal)
        print(name, findings[name], flush=True)
    record.write("decoding", findings, args.suffix)


@dataclass
class Tally:
    """What one way wrote."""

    prompts: list[list[int]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, prompt: list[int], answer: Answer, seconds: float) -> None:
        self.prompts.append(prompt)
        self.answers.append(answer)
        self.seconds.append(seconds)

    def summary(self, lm: LanguageModel, causal: Tally) -> dict[str, Any]:
        num_tokens = sum(len(answer.tokens) for answer in self.answers)
        forwards = sum(answer.forwards for answer in self.answers)
        pairs = [
            TokenPair(tuple(prompt), answer.tokens)
            for prompt, answer in zip(self.prompts, self.answers, strict=True)
        ]
        total = sum(found.log_prob for _, found in log_likelihoods(lm, pairs))
        drafts = [accepted for answer in self.answers for accepted in answer.accepted]
        ratios = [slow / own for slow, own in zip(causal.seconds, self.seconds, strict=True)]
        return {
            "tokens_per_forward": round(num_tokens / forwards, 3),
            "ms_per_token": round(1000 * sum(self.seconds) / num_tokens, 2),
            "times_as_fast_as_causal": [round(value, 3) for value in statistics.quantiles(ratios, n=4)],
            "log_likelihood_per_token": round(total / num_tokens, 3),
            "distinct_3grams": round(distinct([answer.tokens for answer in self.answers], 3), 3),
            "accepted_per_draft": round(statistics.fmean(drafts), 2) if drafts else None,
            "drafts_accepted": counts(drafts),
            "same_as_causal": sum(
                own.tokens == other.tokens for own, other in zip(self.answers, causal.answers, strict=True)
            ),
        }


def counts(drafts: Sequence[int]) -> dict[str, int]:
    """How many drafts had so many tokens accepted."""
    limits = (0, 1, 2, 4, 8, 16, 32, 64, 1 << 30)
    found: dict[str, int] = {}
    for low, high in pairwise(limits):
        name = str(low) if high == low + 1 else f"{low}+" if high == limits[-1] else f"{low}-{high - 1}"
        found[name] = sum(low <= accepted < high for accepted in drafts)
    return {name: count for name, count in found.items() if count}


def distinct(texts: Sequence[Sequence[int]], size: int) -> float:
    """The share of n-grams that are the first of their kind, over all texts."""
    grams = [tuple(text[at : at + size]) for text in texts for at in range(len(text) - size + 1)]
    return len(set(grams)) / max(1, len(grams))


if __name__ == "__main__":
    main()
