"""Ranks that each hold a part of the weights compute what one process computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, distributed

from dgemma.checkpoint.division import part_bytes
from dgemma.checkpoint.load import load_transformer
from dgemma.checkpoint.presets import PRESETS, layers
from dgemma.checkpoint.random_weights import write_random
from dgemma.checkpoint.source import CheckpointSource, open_checkpoint
from dgemma.engine.model_runner import vocab_split
from dgemma.errors import InputError, RankError
from dgemma.model.block_diffusion import BlockDiffusionModel
from dgemma.model.config import ModelConfig
from dgemma.model.execution import Execution
from dgemma.model.model_part import VOCAB_UNIT, ModelPart
from dgemma.model.ranks import ALONE, GroupRanks, Ranks
from dgemma.model.transformer import Transformer
from dgemma.sampling.rng import noise_key
from dgemma.sampling.vocab_scan import SPLIT, ScanOptions, scan_vocab
from thread_ranks import on_ranks

TOLERANCE = 1e-4
CPU = torch.device("cpu")
TINY = PRESETS["tiny"].config
GEOMETRIES = {
    "tiny": TINY,  # too few tokens to divide; one key/value head in full layers
    "tokens for two ranks": replace(TINY, vocab_size=2 * VOCAB_UNIT - 3500, mlp_size=97),
    "tokens for four, odd experts": replace(TINY, vocab_size=5 * VOCAB_UNIT - 1500, num_experts=7),
    "heads of their own": replace(
        TINY,
        num_heads=8,
        layers=layers(3, head_dim=16, kv_heads=8, full_head_dim=32, full_kv_heads=2),
        vocab_size=4 * VOCAB_UNIT,
    ),
}
WAYS = {
    "plain": Execution(),
    "by expert": Execution(grouped_experts=False),
    "exact": Execution(exact=True, encode_block=4, expert_tile=4),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CheckpointSource]:
    def made(number: int, config: ModelConfig) -> CheckpointSource:
        path: Path = tmp_path_factory.mktemp("ranks") / str(number)
        write_random(path, config, dtype="F32", seed=number)
        return open_checkpoint(path)

    return {name: made(number, config) for number, (name, config) in enumerate(GEOMETRIES.items())}


def loaded(source: CheckpointSource, ranks: Ranks, execution: Execution) -> Transformer:
    return load_transformer(source, dtype=torch.float32, device=CPU, execution=execution, ranks=ranks)


def forwards(transformer: Transformer) -> list[Tensor]:
    """Hidden states, logits and soft embeddings of both passes."""
    lm = BlockDiffusionModel(transformer)
    draw = torch.Generator().manual_seed(5)
    config = transformer.config

    def tokens(count: int) -> Tensor:
        return torch.randint(config.vocab_size, (2, count), generator=draw)

    cache = lm.new_cache(2)
    prompt, canvas = tokens(90), tokens(config.canvas_len)
    encoded = lm.encode(prompt, cache, lengths=[90, 41])
    first = lm.logits(lm.denoise(canvas, cache))
    soft = lm.soft_embedding(first)
    return [encoded, first, soft, lm.logits(lm.denoise(canvas, cache, soft))]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_rank_has_the_logits_of_one_process(
    sources: dict[str, CheckpointSource], geometry: str, way: str, size: int
) -> None:
    source, execution = sources[geometry], WAYS[way]
    with torch.inference_mode():
        expected = forwards(loaded(source, ALONE, execution))
    results = on_ranks(size, lambda ranks: forwards(loaded(source, ranks, execution)))
    for found in results:
        for own, first, whole in zip(found, results[0], expected, strict=True):
            assert torch.equal(own, first)  # ranks never differ: they decide alike
            torch.testing.assert_close(own, whole, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "options", [{}, {"num_top_k": 5}, {"with_soft": False}, {"bias": True, "floor": True}]
)
@pytest.mark.parametrize("geometry", list(GEOMETRIES)[1:])
def test_a_divided_vocabulary_is_scanned_as_a_whole_one(
    sources: dict[str, CheckpointSource], geometry: str, options: dict[str, Any]
) -> None:
    source, config = sources[geometry], GEOMETRIES[geometry]
    draw = torch.Generator().manual_seed(7)
    hidden = torch.randn(2, 6, config.hidden_size, generator=draw)
    chosen = dict(options)
    if chosen.pop("bias", False):
        bias = torch.randn(2, config.vocab_size, generator=draw)
        bias[0, :VOCAB_UNIT] = float("-inf")  # in one geometry all that the first rank holds
        chosen["bias"] = bias
    if chosen.pop("floor", False):
        chosen["floor"] = torch.full((2, 6), 0.5)
    key, temperature = noise_key([1, 2], [0, 0], [3, 3], CPU), torch.tensor([0.7, 1.0])

    def scan(ranks: Ranks) -> list[Tensor]:
        model = loaded(source, ranks, Execution())
        found = scan_vocab(
            hidden, model.head, temperature, key, ScanOptions(**chosen), split=vocab_split(model)
        )
        top_k = [] if found.top_k is None else list(found.top_k)
        soft = [] if found.soft is None else [found.soft]
        return [found.argmax, found.sampled, found.entropy, found.log_mass, found.top_logit, *soft, *top_k]

    with torch.inference_mode():
        expected = scan(ALONE)
    for found in on_ranks(2, scan):
        for own, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(own, whole, atol=1e-5, rtol=1e-5)


@given(
    heads=st.sampled_from([4, 8, 16]),
    kv_heads=st.sampled_from([1, 2, 4]),
    experts=st.integers(1, 40),
    mlp=st.integers(1, 50),
    blocks=st.integers(1, 9),
    size=st.sampled_from([1, 2, 3, 4, 8]),
)
def test_the_parts_of_all_ranks_are_the_whole_model(
    heads: int, kv_heads: int, experts: int, mlp: int, blocks: int, size: int
) -> None:
    config = replace(
        TINY,
        num_heads=heads,
        layers=layers(3, head_dim=16, kv_heads=kv_heads, full_head_dim=32, full_kv_heads=1),
        num_experts=experts,
        experts_per_token=1,
        mlp_size=mlp,
        vocab_size=blocks * VOCAB_UNIT - 7,
    )
    if heads % size or kv_heads % size * (size % kv_heads) or size > min(experts, mlp):
        with pytest.raises(InputError, match="tensor_parallel"):
            ModelPart(config, 0, size)
        return
    parts = [ModelPart(config, rank, size) for rank in range(size)]
    assert covered([part.heads for part in parts]) == heads
    assert covered([part.mlp for part in parts]) == mlp
    assert covered([part.experts for part in parts]) == experts
    if parts[0].divides_vocab:
        assert covered([part.vocab for part in parts]) == config.vocab_size
        assert all(part.vocab.start % SPLIT == 0 for part in parts)
    for part in parts:
        for layer, own in zip(config.layers, part.attention.layers, strict=True):
            read = [head * layer.num_kv_heads // heads for head in range(*part.heads.indices(heads))]
            held = part.kv_heads(layer)
            assert set(read) == set(range(held.start, held.stop))
            assert own.num_kv_heads == len(set(read))


def covered(parts: Sequence[slice]) -> int:
    """How much neighbouring parts, none of them empty, cover from zero on."""
    end = 0
    for part in parts:
        assert part.start == end < part.stop
        end = part.stop
    return end


def test_a_geometry_that_cannot_be_divided_is_refused_with_what_can() -> None:
    with pytest.raises(InputError, match=r"4 heads .* by it. Possible here: 1, 2, 4\.") as caught:
        ModelPart(TINY, 0, 3)
    assert caught.value.field == "tensor_parallel"
    with pytest.raises(InputError, match="only 8 experts"):
        ModelPart(replace(TINY, num_heads=16), 0, 16)


def test_a_rank_reads_only_its_part(sources: dict[str, CheckpointSource]) -> None:
    source = sources["heads of their own"]

    def numbers(ranks: Ranks) -> int:
        return sum(p.numel() for p in loaded(source, ranks, Execution()).parameters())

    with torch.inference_mode():
        whole = numbers(ALONE)
    parts = on_ranks(4, numbers)
    assert max(parts) < 0.35 * whole  # norms, the router and some key/value heads are on every rank


def test_a_mesh_of_more_dimensions_than_one_is_refused() -> None:
    class Mesh:
        ndim = 2

    with pytest.raises(InputError, match="mesh has 2 dimensions"):
        GroupRanks.of_mesh(Mesh())  # type: ignore[arg-type]


def test_an_error_of_the_group_is_one_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "Connection closed by peer\nand more"

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(distributed, "get_rank", lambda group: 1)
    monkeypatch.setattr(distributed, "get_world_size", lambda group: 2)
    for name in ("all_reduce", "all_gather", "broadcast_object_list", "barrier"):
        monkeypatch.setattr(distributed, name, fail)
    ranks = GroupRanks()
    x = torch.zeros(2)
    for act in (lambda: ranks.sum(x), lambda: ranks.gather(x), lambda: ranks.share(None), ranks.wait):
        with pytest.raises(RankError, match=r"rank 1 of 2 lost the others: Connection closed by peer All"):
            act()
    message = ""
    with pytest.raises(RankError, match="rank 1 of 2 lost the others"):
        ranks.wait()


@pytest.mark.parametrize("size", [0, -1])
def test_no_ranks_are_refused(size: int) -> None:
    with pytest.raises(InputError, match="must be at least 1"):
        ModelPart(TINY, size=size)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_planned_bytes_of_a_part_are_those_it_has(
    sources: dict[str, CheckpointSource], size: int
) -> None:
    source = sources["tokens for four, odd experts"]
    for rank, model in enumerate(on_ranks(size, lambda ranks: loaded(source, ranks, Execution()))):
        held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        planned = part_bytes(ModelPart(source.config, rank, size), item_bytes=4)
        assert planned <= held < planned * 1.01 + 10_000  # a few buffers are no weights
