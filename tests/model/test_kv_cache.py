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
    with pytest.raises(InputError, match="batch is 0"):
        lm.new_cache(0)
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
