"""One case: a checkpoint, inputs, and what our implementation computes from them, part by part.

A case is a directory that a runner in any environment can read: `checkpoint/`, `inputs.safetensors` and
`plan.json`. The runner writes `outputs.safetensors` with the same names as ours, as many as it can compute.
`plan.json` lists them in the order in which they depend on each other, so the first that differs is where two
runtimes part.

- `L/prompt/...` the causal pass over a prompt of L tokens; `L/canvas/...` a canvas after it;
  `L/conditioned/...` a canvas with self-conditioning on `L/previous`, logits that are given;
  `L/commit/...` the causal pass over a canvas that is committed; `L/next/...` a canvas after that.
  Of each `hidden.N` after layer N, and `logits`.
- `step/...` one step of the sampler: from `step/logits`, with the draws `step/drawn` and the noise
  `step/noise`, the `step/canvas` that the next forward reads.
- `generation/...` a whole generation on recorded draws: `open.C`, `drawn.C.S` and `noise.C.S` are given;
  `argmax.C.S` after each step, and `tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgemma.checkpoint.safetensors_file import TensorToWrite, write_file
from dgemma.language_model import LanguageModel
from dgemma.params import GenerationParams
from dgemma.sampling.rng import NoiseStream, noise_key, random_tokens
from dgemma.sampling.sampler import make_sampler, open_canvas, step
from dgemma.sampling.vocab_scan import scale, scan_dense

STEPS, SEED = 8, 11
_NAMES = {torch.float32: "F32", torch.int64: "I64"}
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class ConformCase:
    """What is given, and what comes out of our implementation, in order."""

    name: str
    contexts: tuple[int, ...]
    inputs: Tensors
    expected: Tensors

    def write(self, path: Path) -> None:
        _write(path / "inputs.safetensors", self.inputs)
        plan = {
            "name": self.name,
            "contexts": self.contexts,
            "outputs": list(self.expected),
            "steps": STEPS,
            "canvases": sum(name.startswith("generation/open.") for name in self.inputs),
            "generation": generation_options(),
        }
        (path / "plan.json").write_text(json.dumps(plan))


def generation_options() -> dict[str, Any]:
    params = GenerationParams(max_denoising_steps=STEPS)
    names = ("t_min", "t_max", "entropy_bound", "stability_threshold", "confidence_threshold")
    return {"max_denoising_steps": STEPS, **{name: getattr(params, name) for name in names}}


def context_lengths(window: int) -> tuple[int, ...]:
    """Below, at and past the sliding window."""
    return tuple(sorted({max(1, length) for length in (1, window - 1, window, window + 1, 3 * window)}))


@torch.inference_mode()
def make_case(lm: LanguageModel, name: str, *, seed: int = 0) -> ConformCase:
    generator = torch.Generator().manual_seed(seed)
    config = lm.config
    contexts = context_lengths(min(config.window, 64))
    inputs: Tensors = {}
    expected: Tensors = {}

    def tokens(count: int) -> Tensor:
        return torch.randint(config.vocab_size, (1, count), generator=generator)

    for length in contexts:
        prompt, canvas, second, commit = (tokens(count) for count in (length, *(3 * (config.canvas_len,))))
        previous = torch.randn(1, config.canvas_len, config.vocab_size, generator=generator)
        given = {
            "prompt": prompt, "canvas": canvas, "second": second, "commit": commit, "previous": previous,
        }  # fmt: skip
        inputs |= {f"{length}/{key}": value[0] for key, value in given.items()}
        cache = lm.new_cache()
        with _hidden(lm, expected, f"{length}/prompt"):
            expected[f"{length}/prompt/logits"] = lm.logits(lm.encode(prompt, cache))[0]
        with _hidden(lm, expected, f"{length}/canvas"):
            expected[f"{length}/canvas/logits"] = lm.logits(lm.denoise(canvas, cache))[0]
        with _hidden(lm, expected, f"{length}/conditioned"):
            soft = lm.soft_embedding(previous)
            expected[f"{length}/conditioned/logits"] = lm.logits(lm.denoise(second, cache, soft))[0]
        with _hidden(lm, expected, f"{length}/commit"):
            expected[f"{length}/commit/logits"] = lm.logits(lm.encode(commit, cache))[0]
        with _hidden(lm, expected, f"{length}/next"):
            expected[f"{length}/next/logits"] = lm.logits(lm.denoise(canvas, cache))[0]
    _add_step(lm, inputs, expected, generator)
    _add_generation(lm, inputs, expected, tokens(contexts[-1])[0].tolist())
    return ConformCase(name, contexts, inputs, _in_order(expected))


def _in_order(expected: Tensors) -> Tensors:
    """Of each pass the layers before the logits."""
    found: Tensors = {}
    for name in expected:
        if name.endswith("/logits"):
            prefix = name.removesuffix("logits")
            found |= {other: expected[other] for other in expected if other.startswith(f"{prefix}hidden.")}
        found[name] = expected[name]
    return found


@contextmanager
def _hidden(lm: LanguageModel, expected: Tensors, prefix: str) -> Iterator[None]:
    """Record what each layer returns."""
    handles = [
        layer.register_forward_hook(
            lambda module, args, out, name=f"{prefix}/hidden.{number}": expected.__setitem__(
                name, out[0][0].clone()
            )
        )
        for number, layer in enumerate(lm.transformer.layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _add_step(lm: LanguageModel, inputs: Tensors, expected: Tensors, generator: torch.Generator) -> None:
    """A step whose logits are sure at some positions, so that some are accepted and others not."""
    canvas_len, vocab_size = lm.config.canvas_len, lm.config.vocab_size
    sharpness = torch.linspace(0.5, 12, canvas_len)[:, None]
    logits = torch.randn(canvas_len, vocab_size, generator=generator) * sharpness
    drawn, noise, canvas = (torch.randint(vocab_size, (canvas_len,), generator=generator) for _ in range(3))
    inputs |= {"step/logits": logits, "step/drawn": drawn, "step/noise": noise, "step/before": canvas}
    sampler = make_sampler(GenerationParams(max_denoising_steps=STEPS))
    temperature = sampler.schedule(torch.tensor([STEPS], dtype=torch.int32), STEPS)
    scan = replace(scan_dense(scale(logits[None], temperature), None), sampled=drawn[None])
    after = step(open_canvas(canvas[None]), scan, noise[None], sampler)
    expected["step/argmax"] = after.argmax[0]
    expected["step/canvas"] = after.canvas[0]


def _add_generation(lm: LanguageModel, inputs: Tensors, expected: Tensors, prompt: list[int]) -> None:
    """Two canvases of our engine. Where a draw was not accepted any other would do: the argmax is given."""
    config = lm.config
    with lm.record() as recorder:
        answer = lm.generate(
            prompt,
            max_tokens=2 * config.canvas_len,
            max_denoising_steps=STEPS,
            seed=SEED,
            ignore_end=True,
        )
    inputs["generation/prompt"] = torch.tensor(prompt)
    (request,) = recorder.trace().requests
    for canvas, steps in enumerate(request.canvases):
        inputs[f"generation/open.{canvas}"] = _noise(lm, NoiseStream.OPEN, canvas, 0)
        for number, taken in enumerate(steps):
            drawn = torch.tensor(taken.argmax)
            drawn[list(taken.accepted)] = torch.tensor(taken.drawn)
            inputs[f"generation/drawn.{canvas}.{number}"] = drawn
            inputs[f"generation/noise.{canvas}.{number}"] = _noise(lm, NoiseStream.RENOISE, canvas, number)
            expected[f"generation/argmax.{canvas}.{number}"] = torch.tensor(taken.argmax)
    expected["generation/tokens"] = torch.tensor(answer.tokens)


def _noise(lm: LanguageModel, stream: NoiseStream, canvas: int, number: int) -> Tensor:
    key = noise_key([SEED], [canvas], [number], torch.device("cpu"))
    return random_tokens(key, stream, lm.config.canvas_len, lm.config.vocab_size)[0]


def _write(path: Path, tensors: Tensors) -> None:
    def chunks(tensor: Tensor) -> list[bytes]:
        return [tensor.contiguous().numpy().tobytes()]

    write_file(
        path,
        (
            TensorToWrite(name, _NAMES[tensor.dtype], tuple(tensor.shape), partial(chunks, tensor))
            for name, tensor in tensors.items()
        ),
    )
