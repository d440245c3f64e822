"""Compare a quantized model with the original: distributions, steps per canvas and task scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from dgemma.evaluation.runner import Evaluation
from dgemma.evaluation.task import EvaluationPlan, PromptReader, Task
from dgemma.language_model import LanguageModel

# Shapes: canvas = positions of one canvas, vocabulary = its tokens.

_PROMPTS = (
    "Write a function that reverses a list without using reversed().",
    "Why is the sea salty?",
    "List the planets from the sun outwards, with one fact about each.",
    "Translate into French: the train leaves at seven, and we must not be late.",
    "A farmer has 17 sheep and all but 9 run away. How many are left? Explain.",
    "Summarize in two sentences what a compiler does.",
    'Return JSON with the fields "name" and "age" for a made-up person.',
    "Continue the story: The lighthouse keeper had not spoken for eleven days.",
)
_POSITIONS = 64  # whose logits are held at once: [64, 262,144] of two models are 134 MB


@dataclass(frozen=True, kw_only=True)
class QuantizedReport:
    """`plain` is the original. Distributions are of one denoise step over its half-noised answers."""

    prompts: int
    kl_nats: float  # mean over positions of KL(plain, quantized)
    argmax_agreement: float  # share of positions whose argmax token is the same
    steps_per_canvas: tuple[float, float]  # plain, quantized
    bytes: tuple[int, int]
    task: str | None = None
    scores: dict[str, tuple[float, float]] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def page(self) -> str:
        plain, quantized = self.bytes
        lines = [
            f"{'':<28}{'plain':>12}{'quantized':>12}",
            f"{'weights':<28}{_size(plain):>12}{_size(quantized):>12}",
            f"{'steps per canvas':<28}{self.steps_per_canvas[0]:>12.2f}{self.steps_per_canvas[1]:>12.2f}",
        ]
        for name, (before, after) in (self.scores or {}).items():
            lines.append(f"{f'{self.task}: {name}':<28}{before:>12.4f}{after:>12.4f}")
        lines.append(
            f"one step over {self.prompts} half-noised answers: KL {self.kl_nats:.2e} nats a position, "
            f"the argmax token is the same at {self.argmax_agreement:.2%} of them"
        )
        return "\n".join(lines)


def compare(
    plain: LanguageModel,
    quantized: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    task: Task[Any] | None = None,
    limit: int = 100,
    seed: int = 0,
) -> QuantizedReport:
    """Run both models on the same prompts (token ids) and seeds. `task`: also compare its scores."""
    length = plain.config.canvas_len
    seeds = list(range(seed, seed + len(prompts)))
    answers = [
        lm.generate([list(ids) for ids in prompts], seeds=seeds, max_tokens=length, decode="diffuse")
        for lm in (plain, quantized)
    ]
    steps = tuple(_mean([s for answer in of_model for s in answer.steps]) for of_model in answers)
    gaps, same = [], []
    for prompt, answer, number in zip(prompts, answers[0], seeds, strict=True):
        canvas = _half_noised(answer.tokens, plain.config.vocab_size, length, number)
        for gap, agree in _one_step(plain, quantized, prompt, canvas):
            gaps.append(gap)
            same.append(agree)
    return QuantizedReport(
        prompts=len(prompts),
        kl_nats=torch.cat(gaps).mean().item(),
        argmax_agreement=torch.cat(same).float().mean().item(),
        steps_per_canvas=(steps[0], steps[1]),
        bytes=(plain.nbytes, quantized.nbytes),
        task=None if task is None else task.name,
        scores=None if task is None else _scores(plain, quantized, task, limit, seed),
    )


def prompts_for(lm: LanguageModel, task: Task[Any] | None, count: int = 8) -> list[tuple[int, ...]]:
    """The task's first prompts; without a task, built-in prompts, or random tokens without a tokenizer."""
    if task is not None:
        reader = PromptReader(lm=lm, raw=bool(getattr(task, "raw", False)))
        return [reader.ids(task.prompt(example)) for example in islice(task.examples(), count)]
    if lm.has_tokenizer:
        return [PromptReader(lm=lm).ids(text) for text in _PROMPTS[:count]]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(lm.config.vocab_size, (count, 16), generator=generator)
    return [tuple(row) for row in drawn.tolist()]


def _half_noised(tokens: Sequence[int], vocab_size: int, length: int, seed: int) -> Tensor:
    """The first canvas of an answer, with each token replaced by a random one with probability 1/2."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(vocab_size, (length,), generator=generator)
    kept = torch.rand(length, generator=generator) < 0.5
    answer = torch.tensor(list(tokens[:length]), dtype=torch.int64)
    canvas = noise.clone()
    canvas[: len(answer)] = torch.where(kept[: len(answer)], answer, noise[: len(answer)])
    return canvas[None]


@torch.inference_mode()
def _one_step(
    plain: LanguageModel, quantized: LanguageModel, ids: Sequence[int], canvas: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    hiddens = []
    for lm in (plain, quantized):
        cache = lm.new_cache(batch=1)
        lm.encode(torch.tensor([list(ids)], device=lm.device), cache)
        hiddens.append(lm.denoise(canvas.to(lm.device), cache)[0])
    for begin in range(0, canvas.shape[1], _POSITIONS):
        before, after = (
            lm.logits(hidden[begin : begin + _POSITIONS]).log_softmax(-1)
            for lm, hidden in zip((plain, quantized), hiddens, strict=True)
        )
        yield (before.exp() * (before - after)).sum(-1), before.argmax(-1) == after.argmax(-1)


def _scores(
    plain: LanguageModel, quantized: LanguageModel, task: Task[Any], limit: int, seed: int
) -> dict[str, tuple[float, float]]:
    means = []
    for lm in (plain, quantized):
        evaluation = Evaluation(lm, task, EvaluationPlan(limit=limit, batch=16, seed=seed))
        for _ in evaluation.run():
            pass
        means.append(evaluation.report().score_means)
    return {name: (means[0][name], means[1][name]) for name in means[0]}


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / max(1, len(numbers))


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
