"""Generate with the oracle, record its draws, and do the same with our parts on those draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

from dgemma.events import Answer
from dgemma.language_model import LanguageModel
from dgemma.model.config import ModelConfig
from dgemma.params import GenerationParams
from dgemma.sampling.sampler import EntropyBound, LinearSchedule, Sampler, StableAndConfident
from dgemma.sampling.vocab_scan import VocabScan, scale, scan_dense
from oracle import oracle_cache
from plain_answer import plain_answer

EOS, PAD = [1, 5], 0


@dataclass
class Recorded:
    """The oracle's draws in order: per canvas one randint, per step one multinomial and one randint."""

    sequence: Tensor
    forwards: float
    randints: list[Tensor] = field(default_factory=list)
    multinomials: list[Tensor] = field(default_factory=list)


def settings(sampler: Sampler) -> dict[str, Any]:
    assert isinstance(sampler.schedule, LinearSchedule)
    assert isinstance(sampler.accept, EntropyBound)
    assert isinstance(sampler.stop, StableAndConfident)
    return {
        "max_denoising_steps": sampler.num_steps,
        "sampler_config": EntropyBoundSamplerConfig(entropy_bound=sampler.accept.bound),
        "t_min": sampler.schedule.t_min,
        "t_max": sampler.schedule.t_max,
        "stability_threshold": sampler.stop.stability,
        "confidence_threshold": sampler.stop.confidence,
    }


def generate_with_oracle(
    oracle: Any, prompt: Tensor, canvases: int, sampler: Sampler, seed: int, **inputs: Tensor
) -> Recorded:
    found = Recorded(torch.empty(0), 0.0)
    randint, multinomial = torch.randint, torch.multinomial

    def record_randint(*args: Any, **kwargs: Any) -> Tensor:
        found.randints.append(randint(*args, **kwargs))
        return found.randints[-1].clone()

    def record_multinomial(*args: Any, **kwargs: Any) -> Tensor:
        found.multinomials.append(multinomial(*args, **kwargs))
        return found.multinomials[-1].clone()

    torch.manual_seed(seed)
    with mock.patch("torch.randint", record_randint), mock.patch("torch.multinomial", record_multinomial):
        out = oracle.generate(
            input_ids=prompt,
            max_new_tokens=canvases * oracle.config.canvas_length,
            eos_token_id=EOS,
            pad_token_id=PAD,
            **settings(sampler),
            **inputs,
        )
    found.sequence = out.sequences[0, prompt.shape[1] :]
    found.forwards = len(found.multinomials)
    return found


Read = Callable[[Tensor, Tensor], VocabScan]
"""(hidden, temperature) -> all of a look at the vocabulary but the draw."""


class Draws:
    """The oracle's draws, in place of ours."""

    def __init__(self, recorded: Recorded, read: Read) -> None:
        self._randints, self._multinomials = iter(recorded.randints), iter(recorded.multinomials)
        self._read = read

    def noise(self, *_: Any) -> Tensor:
        return next(self._randints)

    def read(self, _: Any, hidden: Tensor, temperature: Tensor, *__: Any) -> VocabScan:
        reading = self._read(hidden, temperature)
        return replace(reading, sampled=next(self._multinomials).view_as(reading.argmax))

    def outcome(self, answer: Answer, canvas_len: int) -> tuple[Tensor, int]:
        assert next(self._randints, None) is None, "the oracle drew more"
        # The oracle returns whole canvases, filled up behind the end token.
        filled = [*answer.tokens, *[PAD] * (-len(answer.tokens) % canvas_len)]
        return torch.tensor(filled), answer.forwards


def replay_with_ours(
    lm: LanguageModel,
    recorded: Recorded,
    prompt: Tensor,
    canvases: int,
    sampler: Sampler,
    canvas_len: int | None = None,
    **options: Any,
) -> tuple[Tensor, int]:
    """The product's own engine, on the oracle's draws. canvas_len: of the request; None: the model's."""

    def read(hidden: Tensor, temperature: Tensor) -> VocabScan:
        scaled = scale(lm.logits(hidden), temperature)
        return replace(scan_dense(scaled, None), soft=lm.soft_embedding(scaled))

    draws = Draws(recorded, read)
    length = canvas_len or lm.config.canvas_len
    with (
        mock.patch("dgemma.engine.model_runner.random_tokens", draws.noise),
        mock.patch("dgemma.engine.model_runner.scan_rows", draws.read),
    ):
        answer = lm.generate(
            prompt[0].tolist(),
            max_tokens=canvases * length,
            canvas_len=canvas_len,
            end_tokens=tuple(EOS),
            sampler=sampler,
            seed=0,
            **options,
        )
    return draws.outcome(answer, length)


@dataclass
class OracleModel:
    """The oracle's forward behind our loop: its logits stand for hidden states and soft embeddings."""

    oracle: Any
    config: ModelConfig
    transformer: Any = None
    device = torch.device("cpu")

    def new_cache(self, batch: int = 1, capacity: int | None = None) -> Any:
        return oracle_cache(self.oracle)

    def encode(self, tokens: Tensor, cache: Any) -> Tensor:
        return self.oracle.model.encoder(input_ids=tokens, past_key_values=cache).last_hidden_state

    def denoise(self, canvas: Tensor, cache: Any, soft: Tensor | None = None) -> Tensor:
        return self.oracle(
            decoder_input_ids=canvas, past_key_values=cache, self_conditioning_logits=soft
        ).logits


def replay_with_oracles_forward(
    oracle: Any, recorded: Recorded, prompt: Tensor, canvases: int, sampler: Sampler
) -> tuple[Tensor, int]:
    def read(logits: Tensor, temperature: Tensor) -> VocabScan:
        scaled = scale(logits, temperature)
        return replace(scan_dense(scaled, None), soft=scaled)

    model = OracleModel(oracle, ModelConfig.from_json(oracle.config.to_dict()))
    canvas_len = model.config.canvas_len
    draws = Draws(recorded, read)
    answer = plain_answer(
        model,
        tuple(prompt[0].tolist()),
        seed=0,
        params=GenerationParams(max_tokens=canvases * canvas_len, end_tokens=tuple(EOS)),
        sampler=sampler,
        noise=draws.noise,
        read=draws.read,
    )
    return draws.outcome(answer, canvas_len)
