"""Benchmark of a model: seconds per step, commit and causal token, alternating with the reference.

Speed counts committed tokens, end to end, including the prompt. Every canvas takes exactly K steps, so that
the figures do not depend on the generated text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dgemma.bench.memory import peak_growth_bytes
from dgemma.bench.reference import TimedReference
from dgemma.bench.timing import spread
from dgemma.events import Answer, Commit
from dgemma.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    prompt_tokens: int = 256
    canvases: int = 2
    steps: int = 8  # K: denoise steps per canvas
    causal_tokens: int = 16
    rounds: int = 3


Samples = dict[str, list[float]]


def run_bench(
    lm: LanguageModel,
    reference: TimedReference | None,
    plan: BenchPlan,
    log: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure both alternately, `plan.rounds` times, after a warm-up round."""
    generator = torch.Generator().manual_seed(0)
    # A new prompt per round: the prefix cache holds earlier ones.
    shape = (plan.rounds + 2, 1, plan.prompt_tokens)
    *prompts, last = torch.randint(lm.config.vocab_size, shape, generator=generator)
    ours: Samples = {}
    theirs: Samples = {}
    for number, prompt in enumerate(prompts):
        log("warming up" if number == 0 else f"round {number} of {plan.rounds}")
        _add(ours, _dgemma_round(lm, prompt[0].tolist(), plan))
        if reference is not None:
            _add(theirs, _reference_round(reference, prompt, plan))
        if number == 0:
            ours, theirs = {}, {}
    found: dict[str, Any] = {
        "plan": plan.__dict__,
        "dtype": str(lm.dtype).removeprefix("torch."),
        "device": str(lm.device),
        "exact": lm.transformer.execution.exact,
        "compiled": lm.transformer.execution.fused_vocabulary,
        "dgemma": {name: spread(values) for name, values in ours.items()},
        "peak_extra_bytes": {
            "dgemma": peak_growth_bytes(lambda: _dgemma_diffuse(lm, last[0].tolist(), plan), lm.device)
        },
        "weight_bytes": sum(parameter.nbytes for parameter in lm.transformer.parameters()),
    }
    if reference is not None:
        timed = reference
        found["reference"] = {name: spread(values) for name, values in theirs.items()}
        found["times_faster"] = {
            name: spread([_gain(name, a, b) for a, b in zip(ours[name], theirs[name], strict=True)])
            for name in theirs
        }
        found["peak_extra_bytes"]["reference"] = peak_growth_bytes(
            lambda: timed.diffuse(last, plan.canvases, plan.steps), lm.device
        )
    return found


def _dgemma_diffuse(lm: LanguageModel, prompt: list[int], plan: BenchPlan) -> Answer:
    return lm.generate(
        prompt,
        max_tokens=plan.canvases * lm.config.canvas_len,
        max_denoising_steps=plan.steps,
        confidence_threshold=0.0,
        ignore_end=True,
        seed=0,
    )


def _dgemma_round(lm: LanguageModel, prompt: list[int], plan: BenchPlan) -> dict[str, float]:
    answer = _dgemma_diffuse(lm, prompt, plan)
    assert answer.steps == (plan.steps,) * plan.canvases
    assert answer.cached_tokens == 0
    figures = {
        "seconds_per_step": answer.timings.denoise_s / sum(answer.steps),
        "seconds_per_causal_token": _dgemma_causal(lm, prompt, plan.causal_tokens),
        "tokens_per_second": len(answer.tokens) / answer.timings.total_s,
    }
    if plan.canvases > 1:  # the last canvas is not committed
        figures["seconds_per_commit"] = answer.timings.commit_s / (plan.canvases - 1)
    return figures


def _dgemma_causal(lm: LanguageModel, prompt: list[int], num_tokens: int) -> float:
    """Seconds per token of greedy causal decoding; each token is a forward and a vocabulary scan."""
    # One token more: the first one comes from the forward of the prompt.
    events = lm.stream(
        prompt, decode="causal", max_tokens=num_tokens + 1, temperature=0, ignore_end=True, seed=0
    )
    times = [time.perf_counter() for event in events if isinstance(event, Commit)]
    return (times[-1] - times[0]) / num_tokens


def _reference_round(reference: TimedReference, prompt: torch.Tensor, plan: BenchPlan) -> dict[str, float]:
    times = reference.diffuse(prompt, plan.canvases, plan.steps)
    figures = {
        "seconds_per_step": times.step_s,
        "seconds_per_causal_token": reference.causal(prompt, plan.causal_tokens),
        "tokens_per_second": times.num_tokens / times.total_s,
    }
    if times.commit_s is not None:
        figures["seconds_per_commit"] = times.commit_s
    return figures


def _gain(name: str, ours: float, theirs: float) -> float:
    """The speedup over the reference: a ratio of seconds or, inverted, of speeds."""
    return ours / theirs if name == "tokens_per_second" else theirs / ours


def _add(samples: Samples, values: dict[str, float]) -> None:
    for name, value in values.items():
        samples.setdefault(name, []).append(value)
