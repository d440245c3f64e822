"""Generate with the oracle, record its draws, and do the same with our parts on those draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

from dgemma.diffusion.acceptance import EntropyBound
from dgemma.diffusion.reading import read_dense, scale
from dgemma.diffusion.schedule import LinearSchedule
from dgemma.diffusion.step import Sampler, open_canvas, step
from dgemma.diffusion.stopping import StableAndConfident
from dgemma.language_model import LanguageModel
from oracle import Case, make_oracle, oracle_cache

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


def calm_oracle(case: Case) -> Any:
    """Weights on which rounding does not grow from step to step."""
    oracle = make_oracle(case)
    with torch.no_grad():
        for name, tensor in oracle.named_parameters():
            if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                tensor *= 0.5  # at 0.2 nine of ten tokens would copy the noise they started from
            if name.endswith("self_conditioning.down_proj.weight"):
                tensor *= 0.3
    return oracle


def generate_with_oracle(oracle: Any, prompt: Tensor, canvases: int, sampler: Sampler, seed: int) -> Recorded:
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
        )
    found.sequence = out.sequences[0, prompt.shape[1] :]
    found.forwards = len(found.multinomials)
    return found


@torch.no_grad()
def replay(
    denoise: Callable[[Tensor, Tensor | None], Tensor],
    encode: Callable[[Tensor], None],
    recorded: Recorded,
    prompt: Tensor,
    canvases: int,
    sampler: Sampler,
) -> tuple[Tensor, int]:
    """Our loop on the oracle's draws. `denoise(canvas, scaled logits of the last step) -> logits`."""
    randints, multinomials = iter(recorded.randints), iter(recorded.multinomials)
    encode(prompt)
    answer: list[Tensor] = []
    num_steps = 0
    for number in range(canvases):
        state = open_canvas(next(randints))
        scaled: Tensor | None = None
        while not state.settled.all():
            left = (sampler.num_steps - state.steps).to(torch.int32)
            scaled = scale(denoise(state.canvas, scaled), sampler.schedule(left, sampler.num_steps))
            reading = read_dense(scaled, None)
            reading = replace(reading, drawn=next(multinomials).view_as(reading.guess))
            state = step(state, reading, next(randints), sampler)
            num_steps += 1
        tokens = state.guess[0].clone()
        ends = torch.isin(tokens, torch.tensor(EOS)).nonzero()
        if len(ends):
            tokens[int(ends[0]) + 1 :] = PAD
        answer.append(tokens)
        if len(ends) or number + 1 == canvases:
            break
        encode(state.guess)
    assert next(randints, None) is None, "the oracle drew more"
    return torch.cat(answer), num_steps


def replay_with_ours(
    lm: LanguageModel, recorded: Recorded, prompt: Tensor, canvases: int, sampler: Sampler
) -> tuple[Tensor, int]:
    cache = lm.new_cache()

    def denoise(canvas: Tensor, last: Tensor | None) -> Tensor:
        soft = None if last is None else lm.soft_embedding(last)
        return lm.logits(lm.denoise(canvas, cache, soft))

    def encode(tokens: Tensor) -> None:
        lm.encode(tokens, cache)

    return replay(denoise, encode, recorded, prompt, canvases, sampler)


def replay_with_oracles_forward(
    oracle: Any, recorded: Recorded, prompt: Tensor, canvases: int, sampler: Sampler
) -> tuple[Tensor, int]:
    past = oracle_cache(oracle)

    def encode(tokens: Tensor) -> None:
        oracle.model.encoder(input_ids=tokens, past_key_values=past)

    def denoise(canvas: Tensor, last: Tensor | None) -> Tensor:
        return oracle(decoder_input_ids=canvas, past_key_values=past, self_conditioning_logits=last).logits

    return replay(denoise, encode, recorded, prompt, canvases, sampler)
