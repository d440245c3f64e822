"""The cache: sliding layers keep their window, full layers everything, whatever the order of calls."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dgemma import InputError
from dgemma.checkpoint.presets import PRESETS
from dgemma.language_model import LanguageModel
from dgemma.model.config import LayerKind
from dgemma.model.kv_cache import KVCache, NewKeysValues
from dgemma.model.transformer import Transformer
from oracle import CASES, make_oracle, make_ours, tokens

CASE = CASES[3]  # window 24


@torch.no_grad()
def test_encoding_token_by_token_equals_encoding_at_once() -> None:
    lm = make_ours(make_oracle(CASE))
    prompt, canvas = tokens(CASE, 2, 70, seed=1), tokens(CASE, 2, 8, seed=2)
    whole, stepwise = lm.new_cache(2), lm.new_cache(2)
    expected = lm.encode(prompt, whole)
    found = torch.cat([lm.encode(prompt[:, t : t + 1], stepwise) for t in range(70)], dim=1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(lm.denoise(canvas, stepwise), lm.denoise(canvas, whole), atol=1e-5, rtol=0)


@torch.no_grad()
def test_denoise_writes_nothing() -> None:
    lm = make_ours(make_oracle(CASE))
    cache = lm.new_cache()
    lm.encode(tokens(CASE, 1, 40, seed=1), cache)
    before = [t.clone() for t in (*cache.context().keys, *cache.context().values)]
    lm.denoise(tokens(CASE, 1, 8, seed=2), cache)
    after = [*cache.context().keys, *cache.context().values]
    assert cache.lengths == (40,)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@torch.no_grad()
def test_sliding_layers_stop_growing_and_full_layers_do_not() -> None:
    lm = make_ours(make_oracle(CASE))
    cache = lm.new_cache()
    lm.encode(tokens(CASE, 1, 600, seed=1), cache)
    context = cache.context()
    assert context.slots == {LayerKind.SLIDING: CASE.window - 1, LayerKind.FULL: 600}
    positions = context.positions(LayerKind.SLIDING)[0].sort().values
    assert positions.tolist() == list(range(600 - CASE.window + 1, 600))


@torch.no_grad()
def test_capacity_changes_nothing_but_the_growing() -> None:
    lm = make_ours(make_oracle(CASE))
    prompt, canvas = tokens(CASE, 1, 300, seed=1), tokens(CASE, 1, 8, seed=2)
    small, large = lm.new_cache(), lm.new_cache(capacity=1000)
    for cache in (small, large):
        lm.encode(prompt, cache)
    assert torch.equal(lm.denoise(canvas, small), lm.denoise(canvas, large))
    assert large.nbytes > small.nbytes > 0
    lm.encode(prompt, small)  # a cache that has grown twice holds no more than one that began so large
    assert small.nbytes == lm.new_cache(capacity=600).nbytes


def test_memory_at_full_size_is_the_published_one() -> None:
    cache = KVCache(
        PRESETS["26b"].config, 1, dtype=torch.bfloat16, device=torch.device("meta"), capacity=262_144
    )
    full, window = 262_144 * 20_480, 1023 * 204_800
    assert cache.nbytes == full + window


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    lm = make_ours(make_oracle(CASE))
    limit = lm.config.max_positions
    cache = lm.new_cache()
    lm.encode(tokens(CASE, 1, 4, seed=1), cache)
    with pytest.raises(InputError, match=f"would reach {limit + 4} tokens; this model takes {limit}"):
        cache.check_capacity([limit])
    two = lm.new_cache(2)
    lm.encode(tokens(CASE, 2, 4, seed=1), two, lengths=[4, 0])
    two.check_capacity([limit - 4, limit])
    with pytest.raises(InputError, match=f"would reach {limit + 1} tokens"):
        two.check_capacity([limit - 3, 0])  # the longest row decides, not the shortest
    with pytest.raises(InputError, match="batch is 0"):
        lm.new_cache(0)
    assert lm.new_cache(capacity=0).nbytes == 0
    with pytest.raises(InputError, match=f"capacity is {limit + 1}; this model takes 0 to {limit}"):
        lm.new_cache(capacity=limit + 1)
    assert cache.lengths == (4,)


@torch.no_grad()
def test_the_last_canvas_of_the_longest_context_runs() -> None:
    """262,144 positions: rings, masks and rotary tables hold at the far end."""
    config = dataclasses.replace(PRESETS["tiny"].config, max_positions=262_144)
    lm = LanguageModel(Transformer(config, dtype=torch.bfloat16, device="cpu"))
    for parameter in lm.transformer.parameters():
        parameter.normal_(0, 0.1)
    for name, buffer in lm.transformer.named_buffers():
        if "scalar" in name:
            buffer.fill_(1)
    length = 262_144 - config.canvas_len
    cache = lm.new_cache(capacity=length)
    shapes = [(1, length, s.num_kv_heads, s.head_dim) for s in config.layers]
    torch.manual_seed(0)
    fresh = NewKeysValues(*(tuple(torch.randn(s).bfloat16() for s in shapes) for _ in range(2)))
    cache.append(fresh, [length])
    canvas = torch.randint(config.vocab_size, (1, config.canvas_len))
    hidden = lm.denoise(canvas, cache)
    assert hidden.isfinite().all()
    # The first position is still seen by full layers, and no longer by sliding ones.
    for store, changes in ((cache._values[-1], True), (cache._values[0], False)):
        assert (store.shape[1] >= length) == changes
    cache._values[-1][:, 0] += 1e4
    assert not torch.equal(lm.denoise(canvas, cache), hidden)
    lm.encode(canvas, cache)
    assert cache.lengths == (262_144,)
    with pytest.raises(InputError, match="would reach"):
        lm.denoise(canvas, cache)


@torch.no_grad()
def test_a_selection_grows_on_its_own_and_so_does_its_original() -> None:
    lm = make_ours(make_oracle(CASE))
    prompt, more, canvas = (
        tokens(CASE, 1, 30, seed=1),
        tokens(CASE, 1, 600, seed=2),
        tokens(CASE, 1, 8, seed=3),
    )
    expected = lm.new_cache()
    for part in (prompt, more):
        lm.encode(part, expected)
    original = lm.new_cache()
    lm.encode(prompt, original)
    selected = original.select([0])
    # The first to grow must not make the other believe that it has grown too.
    for cache in (original, selected):
        lm.encode(more, cache)
        assert torch.equal(lm.denoise(canvas, cache), lm.denoise(canvas, expected))


@torch.no_grad()
def test_selected_rows_keep_their_own_past() -> None:
    lm = make_ours(make_oracle(CASE))
    lengths, order = [3, 40, 17], [2, 1, 1, 0]
    cache = lm.new_cache(3)
    lm.encode(tokens(CASE, 3, 40, seed=1), cache, lengths=lengths)
    selected = cache.select(order)
    assert selected.lengths == tuple(lengths[row] for row in order)
    canvas, more = tokens(CASE, 3, 8, seed=2), tokens(CASE, 3, 5, seed=3)
    for _ in range(2):  # once as selected, once after both went on
        expected = lm.denoise(canvas, cache)[order]
        torch.testing.assert_close(lm.denoise(canvas[order], selected), expected, atol=1e-5, rtol=0)
        lm.encode(more, cache)
        lm.encode(more[order], selected)


@torch.no_grad()
def test_each_token_is_appended_to_its_own_slot() -> None:
    """Rows of different lengths, padding before and after the tokens; a ring keeps the newest ones."""
    config = make_ours(make_oracle(CASE)).config
    cache = KVCache(config, 2, dtype=torch.float32, device=torch.device("cpu"))

    def numbered(first: int, count: int) -> NewKeysValues:
        """Keys that are the numbers of their rows and tokens; values are their negatives."""
        shapes = [(2, count, shape.num_kv_heads, shape.head_dim) for shape in config.layers]
        number = torch.arange(first, first + count) + torch.tensor([[0], [1000]])
        keys = tuple(number[..., None, None].float().expand(shape).clone() for shape in shapes)
        return NewKeysValues(keys, tuple(-part for part in keys))

    cache.append(numbered(0, 50), [50, 3])
    cache.append(numbered(48, 7), [5, 0], lead=[2, 0])
    assert cache.lengths == (55, 3)
    context = cache.context()
    assert context.lengths.tolist() == [55, 3]
    for index, shape in enumerate(config.layers):
        positions = context.positions(shape.kind)
        for row, (length, first) in enumerate(((55, 0), (3, 1000))):
            kept = positions[row] >= 0
            assert sorted(positions[row][kept].tolist()) == list(
                range(max(0, length - (config.window - 1)) if shape.kind is LayerKind.SLIDING else 0, length)
            )
            assert (context.keys[index][row][kept][:, 0, 0] == positions[row][kept] + first).all()
            assert (context.values[index][row][kept] == -context.keys[index][row][kept]).all()


def test_a_chunk_with_gradients_leaves_the_past_without_them_alone() -> None:
    """Attention keeps the past for its backward pass: appending in place would change it."""
    lm = make_ours(make_oracle(CASE))
    more = tokens(CASE, 1, 8, seed=2)
    cache = lm.new_cache(capacity=200)
    with torch.no_grad():
        lm.encode(tokens(CASE, 1, 40, seed=1), cache)
    lm.transformer.requires_grad_(True)
    before = [keys.clone() for keys in cache.context().keys]
    context = cache.context()
    lm.encode(more, cache).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, context.keys, strict=True))
    assert all(p.grad is None or p.grad.isfinite().all() for p in lm.transformer.parameters())
    lm.transformer.requires_grad_(False)
