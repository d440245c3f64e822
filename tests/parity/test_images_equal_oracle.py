"""Prompts with images: hidden states equal the oracle's, and whole generations do on its own draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dgemma.engine.local as local_module
import dgemma.engine.model_runner as model_runner
import dgemma.model.attention as attention_module
import dgemma.model.transformer as transformer_module
from comparison import worst
from dgemma.engine.model_runner import PromptChunk
from dgemma.images.preprocess import PlacedImage
from dgemma.language_model import LanguageModel
from dgemma.model.attention import RowSpan
from dgemma.model.config import LayerKind
from dgemma.model.execution import Execution
from dgemma.model.kv_cache import PastKeysValues
from dgemma.model.transformer import SoftImage
from dgemma.sampling.sampler import Sampler
from oracle import CASES, Case, make_ours, oracle_cache, tokens
from replay import Recorded, generate_with_oracle, replay_with_ours
from sizes import IS_FULL, cases
from vision_oracle import (
    IMAGE,
    VISION_CASES,
    VisionCase,
    as_oracle_reads,
    calm_vision_oracle,
    mm_token_type_ids,
    patches_of_grid,
    place_images,
)

TOLERANCE = 1e-4
SIXTEEN = Sampler(num_steps=16)
CANVASES = 2
# Plain, with clipping and standardized, and with grouped heads; windows that are shorter than an image and
# longer; a first layer that is full.
PAIRS = [
    (VISION_CASES[0], CASES[0]),
    (VISION_CASES[5], CASES[3]),
    (VISION_CASES[4], CASES[9]),
    (VISION_CASES[2], CASES[1]),
]
# Where the images stand among the text: alone, at the ends, side by side, and far apart.
LAYOUTS = (
    [IMAGE],
    [7, IMAGE, IMAGE, 8],
    [*range(10, 31), IMAGE, 9],
    [3, IMAGE, *range(10, 40), IMAGE, *range(40, 50)],
)


@dataclass(frozen=True)
class ImageCase:
    """A prompt with images, as ours takes it and as the oracle does."""

    marked: Tensor  # with one token per image
    prompt: Tensor  # with one per soft token
    images: tuple[PlacedImage, ...]
    inputs: dict[str, Tensor]


def image_case(vision: VisionCase, case: Case, seed: int) -> ImageCase:
    layout = LAYOUTS[seed % len(LAYOUTS)]
    text = (tokens(case, 1, len(layout), seed=seed)[0] % 80).tolist()  # beside the tokens of images
    marked = [IMAGE if token == IMAGE else own for token, own in zip(layout, text, strict=True)]
    patches = [
        patches_of_grid(vision, *vision.grids[(seed + number) % len(vision.grids)], seed=10 * seed + number)
        for number in range(marked.count(IMAGE))
    ]
    prompt, images = place_images(marked, patches)
    return ImageCase(
        torch.tensor([marked]), torch.tensor([prompt]), images, as_oracle_reads(patches, vision.settings)
    )


def record(oracle: Any, found: ImageCase, seed: int) -> Recorded:
    types = mm_token_type_ids(found.prompt)
    return generate_with_oracle(
        oracle, found.prompt, CANVASES, SIXTEEN, seed, mm_token_type_ids=types, **found.inputs
    )


def encoded_by_oracle(oracle: Any, found: ImageCase) -> Tensor:
    """Hidden states with the masks that its `generate` makes."""
    encoder, past = oracle.model.encoder, oracle_cache(oracle)
    length = found.prompt.shape[1]
    masks = encoder.create_masks_for_generate(
        config=oracle.config,
        inputs_embeds=torch.empty(1, length, 0),
        attention_mask=torch.ones(1, length, dtype=torch.bool),
        past_key_values=past,
        position_ids=torch.arange(length)[None],
        mm_token_type_ids=mm_token_type_ids(found.prompt),
    )
    output = encoder(input_ids=found.prompt, attention_mask=masks, past_key_values=past, **found.inputs)
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def encoded_by_ours(ours: LanguageModel, found: ImageCase) -> Tensor:
    layers = ours.config.layers
    empty = tuple(torch.empty(0, layer.num_kv_heads, layer.head_dim) for layer in layers)
    past = PastKeysValues(empty, empty, dict.fromkeys(ours.config.kinds, 0), length=0)
    chunk = PromptChunk(found.prompt[0].tolist(), past, None, found.images)
    (encoded,), _ = model_runner.forward(ours.transformer, [chunk], [])
    return encoded.hidden


WAYS = {
    "plain": Execution(encode_block=8),
    "exact": Execution(exact=True, encode_block=8, expert_tile=4),
    "by expert": Execution(grouped_experts=False),
}


@pytest.mark.parametrize("bidirectional", [True, False], ids=["whole images", "causal images"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].name}; {pair[1].name}")
@torch.no_grad()
def test_hidden_states_equal_the_oracles(pair: tuple[VisionCase, Case], bidirectional: bool) -> None:
    vision, case = pair
    oracle = calm_vision_oracle(vision, case, bidirectional=bidirectional)
    for seed in range(len(LAYOUTS)):
        found = image_case(vision, case, seed)
        wanted = encoded_by_oracle(oracle, found)
        for way, execution in WAYS.items():
            ours = make_ours(oracle, execution=execution)
            assert worst(encoded_by_ours(ours, found), wanted) <= TOLERANCE, (seed, way)


@pytest.mark.parametrize(
    "pair", PAIRS[: cases(full=4, part=2)], ids=lambda pair: f"{pair[0].name}; {pair[1].name}"
)
@torch.no_grad()
def test_generations_are_token_identical(
    pair: tuple[VisionCase, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of eight tokens, which end within images if nothing prevents it."""
    monkeypatch.setattr(local_module, "CHUNK_SIZE", 8)
    vision, case = pair
    oracle = calm_vision_oracle(vision, case)
    for seed in range(24 if IS_FULL else len(LAYOUTS)):
        found = image_case(vision, case, seed)
        recorded = record(oracle, found, seed)
        ways = ("plain", "exact") if IS_FULL else (("plain", "exact")[seed % 2],)
        for way in ways:
            ours = make_ours(oracle, execution=WAYS[way])
            patches = [image.patches for image in found.images]
            answer, steps = replay_with_ours(ours, recorded, found.marked, CANVASES, SIXTEEN, images=patches)
            assert torch.equal(answer, recorded.sequence), (seed, way)
            assert steps == recorded.forwards


Mutation = Callable[[pytest.MonkeyPatch], None]


def change_spans(change: Callable[[RowSpan], RowSpan], *kinds: LayerKind) -> Mutation:
    """The images that attention of these kinds of layers sees."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        attend = transformer_module.attend_ragged_causal

        def mutated(context: Any, kind: LayerKind, spans: Any, *rest: Any) -> Any:
            return attend(context, kind, [change(span) if kind in kinds else span for span in spans], *rest)

        patch.setattr(transformer_module, "attend_ragged_causal", mutated)

    return mutate


def causal(span: RowSpan) -> RowSpan:
    return replace(span, images=())


def with_marks(span: RowSpan) -> RowSpan:
    return replace(span, images=tuple((first - 1, stop + 1) for first, stop in span.images))


def without_the_last_token(span: RowSpan) -> RowSpan:
    return replace(span, images=tuple((first, stop - 1) for first, stop in span.images))


def as_one_image(span: RowSpan) -> RowSpan:
    return replace(span, images=((span.images[0][0], span.images[-1][1]),))


def within_the_window(patch: pytest.MonkeyPatch) -> None:
    mask = attention_module.block_mask

    def mutated(position: Tensor, start: int, block: int, window: int | None, images: Any) -> Tensor:
        seen = mask(position, start, block, window, images)
        if window is not None:
            seen = seen & (position > torch.arange(start, start + block)[:, None] - window)
        return seen

    patch.setattr(attention_module, "block_mask", mutated)


def change_soft(change: Callable[[SoftImage], SoftImage]) -> Mutation:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        made = model_runner.soft_image
        patch.setattr(model_runner, "soft_image", lambda *given: change(made(*given)))

    return mutate


BOTH = tuple(LayerKind)
MUTATIONS: dict[str, Mutation] = {
    "causal in sliding layers": change_spans(causal, LayerKind.SLIDING),
    "causal in full layers": change_spans(causal, LayerKind.FULL),
    "the marks belong to an image": change_spans(with_marks, *BOTH),
    "the last token does not": change_spans(without_the_last_token, *BOTH),
    "two images are one": change_spans(as_one_image, *BOTH),
    "within the window": within_the_window,
    "one position later": change_soft(lambda image: replace(image, start=image.start + 1)),
    "one position earlier": change_soft(lambda image: replace(image, start=image.start - 1)),
    "in another order": change_soft(lambda image: replace(image, soft=image.soft.flip(0))),
    "scaled as tokens are": change_soft(lambda image: replace(image, soft=image.soft * 32**0.5)),
}


@pytest.mark.parametrize("name", MUTATIONS)
@torch.no_grad()
def test_wrong_masks_and_positions_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vision, case = PAIRS[0]
    oracle = calm_vision_oracle(vision, replace_window(case))
    found = image_case(vision, case, seed=1)  # two images side by side
    wanted = encoded_by_oracle(oracle, found)
    ours = make_ours(oracle, execution=WAYS["plain"])
    assert worst(encoded_by_ours(ours, found), wanted) <= TOLERANCE
    MUTATIONS[name](monkeypatch)
    assert worst(encoded_by_ours(ours, found), wanted) > 10 * TOLERANCE


def replace_window(case: Case) -> Case:
    """A window that is shorter than an image."""
    return _SHORT_WINDOW.setdefault(case, Case(case.name, {**case.text, "sliding_window": 3}, seed=case.seed))


_SHORT_WINDOW: dict[Case, Case] = {}
