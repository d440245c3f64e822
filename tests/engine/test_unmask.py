"""Masked diffusion: the engine's texts are those of the published algorithm, written out on dense logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from dgemma.engine.request import EngineRequest, PinnedTokens, validate_request
from dgemma.errors import ConfigError, InputError
from dgemma.language_model import LanguageModel
from dgemma.model.config import ModelConfig
from dgemma.model.execution import Execution
from dgemma.model.kv_cache import NewKeysValues
from dgemma.model.transformer import DenoiseInput, EncodeInput
from dgemma.params import GenerationParams
from dgemma.sampling import sampler as sampler_module
from dgemma.sampling.rng import noise_key
from dgemma.sampling.sampler import EntropyScore, Sampler, masked_sampler
from dgemma.sampling.vocab_scan import sample_dense
from engine_life import CONFIG, ENCODE_BLOCK
from toy_transformer import ToyTransformer

MASK = 7
CANVAS = 8
MASKED = replace(CONFIG, canvas_len=CANVAS, mask_token=MASK)
CPU = torch.device("cpu")


class MaskPredictor(ToyTransformer):
    """Like the published models, without self-conditioning."""

    def forward(self, parts: Any) -> list[tuple[Tensor, NewKeysValues]]:
        bare: list[EncodeInput | DenoiseInput] = [
            replace(part, soft=torch.zeros_like(part.soft))
            if isinstance(part, DenoiseInput) and part.soft is not None
            else part
            for part in parts
        ]
        return super().forward(bare)


@cache
def model() -> LanguageModel:
    return LanguageModel(MaskPredictor(MASKED, Execution(exact=True, encode_block=ENCODE_BLOCK), seed=3))


@torch.inference_mode()
def published(
    prompt: tuple[int, ...],
    *,
    num_canvases: int = 1,
    num_steps: int,
    block_len: int = CANVAS,
    temperature: float = 0.0,
    min_confidence: float | None = None,
    seed: int = 0,
    pins: Mapping[int, int] | None = None,
) -> list[int]:
    """LLaDA's generation with low-confidence remasking (arXiv 2502.09992, algorithm 5; its generate.py), in
    semi-autoregressive blocks: all masked positions are predicted, all but the most confident ones are masked
    again. `min_confidence`: SDAR's dynamic rule. Each canvas follows the encoded ones before it.
    """
    lm, answer = model(), []
    context = lm.new_cache()
    lm.encode(torch.tensor([prompt]), context)
    steps_per_block = num_steps // (CANVAS // block_len)
    for number in range(num_canvases):
        begin = number * CANVAS
        canvas = [(pins or {}).get(begin + position, MASK) for position in range(CANVAS)]
        step = 0
        for block in range(CANVAS // block_len):
            inside = range(block * block_len, (block + 1) * block_len)
            count = sum(canvas[position] == MASK for position in inside)
            quotas = [
                count // steps_per_block + (i < count % steps_per_block) for i in range(steps_per_block)
            ]
            for quota in quotas:
                masked = [position for position in inside if canvas[position] == MASK]
                if not masked:
                    break  # the published code goes on, and changes nothing
                logits = lm.logits(lm.denoise(torch.tensor([canvas]), context)).double()
                logits[..., MASK] = float("-inf")
                tokens = logits.argmax(-1)[0]
                if temperature > 0:
                    logits = logits / temperature
                    tokens = sample_dense(logits.float(), noise_key([seed], [number], [step], CPU))[0]
                step += 1
                confidence = logits.softmax(-1)[0]
                sure = {p: float(confidence[p, tokens[p]]) for p in masked}
                keep = sorted(masked, key=lambda position: -sure[position])[:quota]
                if min_confidence is not None:
                    keep += [position for position in masked if sure[position] >= min_confidence]
                for position in keep:
                    canvas[position] = int(tokens[position])
        answer += canvas
        lm.encode(torch.tensor([canvas]), context)
    return answer


def written(
    prompt: tuple[int, ...],
    sampler: Sampler,
    *,
    tokens: int = CANVAS,
    temperature: float = 0.0,
    **options: Any,
) -> list[int]:
    answer = model().generate(
        prompt, sampler=sampler, max_tokens=tokens, temperature=temperature, ignore_end=True, **options
    )
    return list(answer.tokens)


PROMPTS = tuple(
    tuple(torch.randint(10, 500, (5,), generator=torch.Generator().manual_seed(number)).tolist())
    for number in range(5)
)
GEOMETRIES = [(8, 8), (8, 4), (8, 3), (8, 1), (8, 16), (4, 8), (4, 6), (4, 2), (2, 4), (1, 8), (4, 20)]


@pytest.mark.parametrize(("block_len", "num_steps"), GEOMETRIES)
def test_greedy_texts_are_those_of_the_published_algorithm(block_len: int, num_steps: int) -> None:
    sampler = masked_sampler(num_steps=num_steps, block_len=block_len)
    for prompt in PROMPTS:
        found = written(prompt, sampler, tokens=2 * CANVAS)
        assert found == published(prompt, num_canvases=2, num_steps=num_steps, block_len=block_len)
        assert MASK not in found


@pytest.mark.parametrize("temperature", [1.0, 0.4])
@pytest.mark.parametrize("min_confidence", [None, 0.3])
def test_sampled_texts_are_those_of_the_algorithm_with_the_same_noise(
    temperature: float, min_confidence: float | None
) -> None:
    sampler = masked_sampler(num_steps=4, block_len=4, temperature=temperature, min_confidence=min_confidence)
    texts = set()
    for seed, prompt in enumerate(PROMPTS):
        found = written(prompt, sampler, tokens=2 * CANVAS, temperature=1.0, seed=seed)
        options: dict[str, Any] = {"temperature": temperature, "min_confidence": min_confidence, "seed": seed}
        assert found == published(prompt, num_canvases=2, num_steps=4, block_len=4, **options)
        texts.add(tuple(found))
    assert len(texts) == len(PROMPTS)


def test_the_dynamic_rule_takes_fewer_steps_and_never_more() -> None:
    def steps(min_confidence: float | None) -> int:
        sampler = masked_sampler(num_steps=8, min_confidence=min_confidence)
        return (
            model()
            .generate(PROMPTS[0], sampler=sampler, max_tokens=CANVAS, temperature=0.0, ignore_end=True)
            .steps[0]
        )

    assert steps(None) == 8
    assert 1 <= steps(0.05) < 8
    assert steps(0.0) == 1


def test_pins_hold_and_the_rest_is_as_published() -> None:
    pins = {1: 33, 2: 34, 9: 35, 12: 36}
    for prompt in PROMPTS:
        found = written(prompt, masked_sampler(num_steps=6, block_len=4), tokens=2 * CANVAS, pins=pins)
        assert found == published(prompt, num_canvases=2, num_steps=6, block_len=4, pins=pins)
        assert {p: found[p] for p in pins} == pins


def test_a_set_of_allowed_tokens_narrows_what_is_sampled() -> None:
    found = written(PROMPTS[0], masked_sampler(num_steps=4), pins={3: [40, 41, MASK], 6: [50]})
    assert found[3] in (40, 41)
    assert found[6] == 50
    assert MASK not in found


def test_drafts_never_show_a_mask_and_a_seed_repeats_its_text_in_company() -> None:
    lm, sampler = model(), masked_sampler(num_steps=8, min_confidence=0.5)
    alone = [written(prompt, sampler, temperature=1.0, seed=4) for prompt in PROMPTS[:4]]
    together = lm.generate(PROMPTS[:4], sampler=sampler, max_tokens=CANVAS, seeds=[4] * 4, ignore_end=True)
    assert [list(answer.tokens) for answer in together] == alone
    for event in lm.stream(
        PROMPTS[0], sampler=sampler, max_tokens=CANVAS, seed=4, ignore_end=True, drafts=True
    ):
        assert MASK not in getattr(event, "tokens", ())


def less_certain(uncertainty: Tensor, free: Tensor, count: int | Tensor) -> Tensor:
    return KEEP(-uncertainty, free, count)


def one_more(uncertainty: Tensor, free: Tensor, count: int | Tensor) -> Tensor:
    return KEEP(uncertainty, free, count + 1)


def any_block(canvas: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *others, rule, free = rest
    return UNMASK(canvas, *others, replace(rule, block_len=None), free)


def resampled(canvas: Tensor, scan: Any, masks: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Positions that have their token are sampled again."""
    after, guess, accepted = UNMASK(canvas, scan, masks, *rest)
    return torch.where(canvas != masks, scan.sampled, after), guess, accepted


KEEP, UNMASK = sampler_module._most_certain, sampler_module._unmask
BROKEN: list[tuple[str, Any]] = [
    ("_most_certain", less_certain), ("_most_certain", one_more), ("_unmask", any_block),
    ("_unmask", resampled),
]  # fmt: skip


@pytest.mark.parametrize(("name", "wrong"), BROKEN, ids=lambda each: getattr(each, "__name__", None))
def test_a_broken_rule_is_seen(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any) -> None:
    monkeypatch.setattr(sampler_module, name, wrong)
    sampler = masked_sampler(num_steps=4, block_len=4)
    assert any(written(prompt, sampler) != published(prompt, num_steps=4, block_len=4) for prompt in PROMPTS)


def test_another_score_is_seen() -> None:
    sampler = replace(masked_sampler(num_steps=4, block_len=4), score=EntropyScore())
    assert any(written(prompt, sampler) != published(prompt, num_steps=4, block_len=4) for prompt in PROMPTS)


def ask(config: ModelConfig = MASKED, sampler: Sampler | None = None, **options: Any) -> None:
    params = GenerationParams(max_tokens=CANVAS, **options.pop("params", {}))
    request = EngineRequest(
        prompt=(2, 3), seed=0, params=params, sampler=sampler or masked_sampler(num_steps=8), **options
    )
    validate_request(request, config, adapters=[None])


def test_a_model_without_a_mask_token_refuses_by_name() -> None:
    ask()
    with pytest.raises(
        InputError, match=r"sampler unmasks .* names no mask_token_id: .*DiffusionGemma"
    ) as told:
        ask(replace(MASKED, mask_token=None))
    assert told.value.field == "sampler"


@pytest.mark.parametrize(
    ("sampler", "rule"),
    [
        (masked_sampler(num_steps=8, block_len=3), "block_len is 3; it must divide the canvas of 8"),
        (masked_sampler(num_steps=8, block_len=16), "block_len is 16; it must divide"),
        (masked_sampler(num_steps=7, block_len=4), "num_steps is 7; it must be a multiple of the 2 blocks"),
        (masked_sampler(num_steps=0), "num_steps is 0"),
    ],
)
def test_a_schedule_that_cannot_fill_a_canvas_is_refused(sampler: Sampler, rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        ask(sampler=sampler)


def test_blocks_need_whole_canvases_and_one_block_needs_none() -> None:
    with pytest.raises(InputError, match='canvas_len is "auto", and the sampler unmasks blocks of 4') as told:
        written(PROMPTS[0], masked_sampler(num_steps=8, block_len=4), tokens=3, canvas_len="auto")
    assert told.value.field == "canvas_len"
    assert len(written(PROMPTS[0], masked_sampler(num_steps=8), tokens=3, canvas_len="auto")) == 3


def test_other_ways_to_decode_formats_and_the_mask_as_only_choice_are_refused() -> None:
    for decode in ("causal", "lossless", "verified", "auto"):
        with pytest.raises(InputError, match=f'decode is "{decode}", and the sampler unmasks'):
            ask(params={"decode": decode})
    with pytest.raises(InputError, match="response format"):
        ask(constraint=object())
    with pytest.raises(InputError, match="position 2 may only hold the mask token 7"):
        ask(pinned=PinnedTokens(among={2: (MASK,)}))


def test_the_mask_token_is_read_from_config_json_and_written_back() -> None:
    raw = MASKED.to_json()
    assert raw["mask_token_id"] == MASK
    assert ModelConfig.from_json(raw) == MASKED
    assert "mask_token_id" not in CONFIG.to_json()
    assert ModelConfig.from_json(CONFIG.to_json()).mask_token is None
    with pytest.raises(ConfigError, match="mask_token_id is 512; the vocabulary has 512"):
        ModelConfig.from_json({**raw, "mask_token_id": 512})
