"""Images in the engine: prefixes are reused by their pixels, and nothing depends on chunks or company."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dgemma
from dgemma.checkpoint.load import load_transformer
from dgemma.checkpoint.quantized.quantization_config import quantization_config_for
from dgemma.checkpoint.quantized.writer import from_checkpoint, write_quantized
from dgemma.checkpoint.source import open_checkpoint
from dgemma.engine.engine import Engine
from dgemma.engine.kv_cache_manager import KVCacheManager
from dgemma.engine.prefix_cache import BlockHashChain
from dgemma.engine.rank_engine import RankEngine
from dgemma.engine.request import EngineRequest, validate_request
from dgemma.engine.scheduler import SchedulerConfig
from dgemma.engine.service import Failed
from dgemma.errors import InputError
from dgemma.events import Answer, Finish
from dgemma.images.preprocess import ImagePatches, ImageSettings, PlacedImage, cut_patches
from dgemma.model.quantized_linear import QuantizedLinear
from dgemma.model.ranks import Ranks
from dgemma.model.transformer import Transformer
from dgemma.params import GenerationParams
from image_checkpoint import CONFIG, write_image_checkpoint
from random_image import random_image
from thread_ranks import on_ranks

SETTINGS = ImageSettings(patch_size=4, pooling=3, max_tokens=70)
PARAMS = GenerationParams(max_tokens=32, max_denoising_steps=3, ignore_end=True)
BLOCK = 32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_checkpoint(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Transformer:
    return dgemma.load(checkpoint, dtype="float32", exact=True).transformer


def image(seed: int, width: int = 120, height: int = 84) -> ImagePatches:
    return cut_patches(random_image(seed, width, height), SETTINGS)


def request(before: int, patches: Sequence[ImagePatches], after: int, *, row: int = 0) -> EngineRequest:
    """Text, images, text."""
    tokens, placed = [2, *range(100, 100 + before)], []
    for own in patches:
        placed.append(PlacedImage(start=len(tokens) + 1, patches=own))
        tokens += [61, *[60] * own.num_tokens, 62]
    tokens += range(300, 300 + after)
    return EngineRequest(prompt=tuple(tokens), images=tuple(placed), seed=row, params=PARAMS, row=row)


def engine_of(
    model: Transformer, *, chunk: int = 64, reuse: bool = True, kind: type[Engine] = Engine
) -> Engine:
    kv_manager = KVCacheManager(block_size=BLOCK, window=model.config.window, reuse=reuse)
    limits = SchedulerConfig(max_num_seqs=4, chunk_size=chunk, encode_block=model.execution.encode_block)
    return kind({None: model}, kv_manager, limits)


def answers(engine: Engine, requests: Sequence[EngineRequest]) -> list[Answer]:
    validated = [engine.validate(one) for one in requests]
    engine.reserve(validated)
    ids = [engine.add(one) for one in validated]
    found: dict[int, Answer] = {}
    while not engine.is_idle:
        for request_id, event in engine.step():
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finish):
                found[request_id] = event.answer
    return [found[id_] for id_ in ids]


def alone(model: Transformer, one: EngineRequest) -> Answer:
    (found,) = answers(engine_of(model, chunk=4096, reuse=False), [one])
    return found


def test_chunks_company_and_reuse_change_no_bit(model: Transformer) -> None:
    """Images longer than the window and the chunk, at any place, and prompts that share beginnings."""
    one, other = image(1), image(2, 84, 130)
    assert one.num_tokens > model.config.window
    requests = [
        request(5, [one], 9, row=0),
        request(40, [one, other], 3, row=1),
        request(5, [one], 70, row=2),
        request(90, [], 4, row=3),
        request(5, [other], 9, row=4),
        request(5, [one, one], 0, row=5),
    ]
    wanted = [alone(model, one).tokens for one in requests]
    assert len(set(wanted)) == len(wanted)
    for chunk in (64, 128):
        engine = engine_of(model, chunk=chunk)
        assert [answer.tokens for answer in answers(engine, requests)] == wanted
        again = answers(engine, requests)
        assert [answer.tokens for answer in again] == wanted
        assert sum(answer.cached_tokens > 0 for answer in again) >= 2


def test_another_image_of_as_many_tokens_shares_nothing(model: Transformer) -> None:
    one, other = image(1), image(3)
    assert one.num_tokens == other.num_tokens
    first, second = request(0, [one], 40), request(0, [other], 40)
    assert first.prompt == second.prompt
    engine = engine_of(model)
    answers(engine, [first])
    (found,) = answers(engine, [second])
    assert found.cached_tokens == 0
    assert found.tokens == alone(model, second).tokens
    (same,) = answers(engine, [first])
    assert same.cached_tokens >= one.num_tokens


def test_text_before_another_image_is_shared(model: Transformer) -> None:
    engine = engine_of(model)
    text = request(70, [image(1)], 8)
    answers(engine, [text])
    other = request(70, [image(3)], 8)
    answers(engine, [other])  # leaves the end of what both share
    (found,) = answers(engine, [request(70, [image(4)], 8)])
    assert 0 < found.cached_tokens <= 71
    assert found.tokens == alone(model, request(70, [image(4)], 8)).tokens


def test_a_prefix_never_ends_within_an_image(model: Transformer) -> None:
    """A request that ends soon after an image leaves no place within it where another could go on."""
    engine = engine_of(model)
    one = image(1)
    answers(engine, [request(0, [one], 1)])
    (found,) = answers(engine, [request(0, [one], 50)])
    assert found.cached_tokens == 0 or found.cached_tokens > one.num_tokens
    assert found.tokens == alone(model, request(0, [one], 50)).tokens


def test_ranks_have_the_whole_tower_and_answer_as_one_process(checkpoint: Path) -> None:
    source = open_checkpoint(checkpoint)
    requests = [request(5, [image(1)], 9, row=0), request(20, [image(2, 84, 130), image(3)], 3, row=1)]

    def run(ranks: Ranks) -> list[tuple[int, ...]]:
        part = load_transformer(source, dtype=torch.float32, device=torch.device("cpu"), ranks=ranks)
        engine = engine_of(part, kind=RankEngine)
        assert isinstance(engine, RankEngine)
        if not ranks.leads:
            while engine.follow():
                pass
            return []
        found = [answer.tokens for answer in answers(engine, requests)]
        engine.close()
        return found

    whole = load_transformer(source, dtype=torch.float32, device=torch.device("cpu"))
    with torch.inference_mode():
        expected = [answer.tokens for answer in answers(engine_of(whole), requests)]
    assert on_ranks(2, run)[0] == expected


def test_of_a_quantized_model_the_tower_is_not(checkpoint: Path, tmp_path: Path) -> None:
    source = open_checkpoint(checkpoint)
    plan = quantization_config_for("int8", source.config)
    write_quantized(tmp_path / "int8", from_checkpoint(source), plan)
    plain, quantized = (dgemma.load(path, dtype="bfloat16") for path in (checkpoint, tmp_path / "int8"))
    assert plain.transformer.vision is not None
    assert quantized.transformer.vision is not None
    own, other = quantized.transformer.vision.state_dict(), plain.transformer.vision.state_dict()
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
    assert {tensor.dtype for tensor in own.values()} == {torch.bfloat16}
    assert isinstance(quantized.transformer.embedding, QuantizedLinear)
    (found,) = answers(engine_of(quantized.transformer), [request(5, [image(1)], 9)])
    assert len(found.tokens) == 32


def test_hashes_of_blocks_depend_on_the_image_and_its_place() -> None:
    one, other = image(1), image(3)

    def hashes(patches: ImagePatches, start: int) -> list[bytes]:
        chain = BlockHashChain(BLOCK, images=(PlacedImage(start=start, patches=patches),))
        chain.add([60] * 50)
        chain.add([60] * 150)
        return chain.hashes

    plain = BlockHashChain(BLOCK)
    plain.add([60] * 200)
    assert hashes(one, 40)[0] == hashes(other, 40)[0] == plain.hashes[0]
    different = zip(
        hashes(one, 40)[1:], hashes(other, 40)[1:], hashes(one, 41)[1:], plain.hashes[1:], strict=True
    )
    assert all(len(set(group)) == 4 for group in different)
    assert hashes(one, 40) == hashes(one, 40)


def test_a_request_with_images_travels_to_another_process() -> None:
    one = request(3, [image(1)], 4)
    again = pickle.loads(pickle.dumps(one))
    assert again == one
    assert len(pickle.dumps(one)) < 2 * len(one.images[0].patches.pixels)
    assert str(one).count("\\x") == 0  # nobody's pixels are in a log


def test_images_that_the_model_cannot_take_are_refused_by_name() -> None:
    one = request(3, [image(1)], 4)

    def refused(match: str, config: object = CONFIG, **changes: object) -> None:
        with pytest.raises(InputError, match=match) as caught:
            validate_request(replace(one, **changes), config, adapters=[None])
        assert caught.value.field == "images"

    (placed,) = one.images
    refused("images are given, but this model reads text only", replace(CONFIG, vision=None))
    refused("number 1, at positions 12 to .* end within the prompt", images=(replace(placed, start=12),))
    refused("number 2, at positions 5 to .* must begin at", images=(placed, placed))
    for changes in ({"rows": placed.patches.rows - 1}, {"num_tokens": 3}, {"pixels": b""}, {"rows": 0}):
        refused(
            "not prepared for this model",
            images=(replace(placed, patches=replace(placed.patches, **changes)),),
        )
    assert CONFIG.vision is not None
    short = replace(CONFIG, vision=replace(CONFIG.vision, num_positions=16))
    refused("this model has positions for 16 on each side", short)
