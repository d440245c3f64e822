"""The estimate of a step is the step: what is alive is counted, and what is freed is not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from dgemma.checkpoint.parameter_count import count_parameters
from dgemma.checkpoint.presets import PRESETS, layers
from dgemma.model.lora import LoraSettings
from dgemma.training import memory
from dgemma.training.memory import (
    CheaperSetting,
    MemoryEstimate,
    cheaper_setting,
    estimate_step,
    peak_bytes,
    with_4bit_base,
)
from dgemma.training.recipe import DataRecipe, Recipe

MB = 1 << 20
CONFIG = replace(PRESETS["tiny"].config, layers=PRESETS["tiny"].config.layers[-1:])


def new(megabytes: int) -> torch.Tensor:
    return torch.zeros(megabytes * MB // 4)


def test_the_peak_counts_what_lives_at_once() -> None:
    def run() -> None:
        a = new(3)
        b = a + 1  # 6 alive
        del a
        c = b * 2  # 6 again
        c += 1  # in place
        c.view(-1, 4).transpose(0, 1)  # a view
        del b, c
        new(5)

    assert peak_bytes(run) == 6 * MB


def test_what_autograd_keeps_is_alive_until_backward_frees_it() -> None:
    weight = torch.ones(MB // 4, requires_grad=True)

    def run(chain: int) -> None:
        x = weight
        for _ in range(chain):
            x = x.sin()  # keeps its input
        x.sum().backward()

    assert peak_bytes(lambda: run(10)) >= 10 * MB
    assert peak_bytes(lambda: run(20)) - peak_bytes(lambda: run(10)) == 10 * MB
    weight.grad = None

    def without() -> None:
        with torch.no_grad():
            run_x = weight
            for _ in range(10):
                run_x = run_x.sin()

    assert peak_bytes(without) == 2 * MB


def recipe_of(**changes: object) -> Recipe:
    basic = {"model": "m", "out": "o", "data": DataRecipe(path="d", max_length=64), "batch": 2}
    basic["precision"] = "bf16"
    return Recipe(**{**basic, **changes})  # type: ignore[arg-type]


@cache
def basic_estimate() -> MemoryEstimate:
    return estimate_step(CONFIG, recipe_of())


def test_weights_and_optimizer_are_counted_to_the_byte() -> None:
    config = CONFIG
    census = count_parameters(config)
    lora = basic_estimate()
    factors = lora.trained // 8  # two moments of four bytes
    frequencies = sum(config.head_dim(kind) // 2 * 4 for kind in config.kinds)
    assert lora.weights == census.total_parameters * 2 + factors * 4 + frequencies
    whole = estimate_step(config, recipe_of(train="all", freeze=()))
    trained = census.total_parameters - 2 * len(config.layers)  # all but the scalars
    assert whole.weights == census.total_parameters * 2 + frequencies
    assert whole.trained == trained * 12  # a master and two moments
    exact = estimate_step(config, recipe_of(train="all", freeze=(), precision="fp32"))
    assert exact.trained == trained * 8  # float32 weights are their own masters


def test_more_examples_longer_texts_and_keeping_cost_more() -> None:
    config = CONFIG
    one = basic_estimate().activations
    assert estimate_step(config, recipe_of(batch=4)).activations > 1.6 * one
    assert estimate_step(config, recipe_of(batch=4, micro_batch=2)).activations == one
    longer = DataRecipe(path="d", max_length=128)
    assert estimate_step(config, recipe_of(data=longer)).activations > 1.4 * one
    deep = replace(config, layers=layers(2, head_dim=16, kv_heads=2, full_head_dim=32, full_kv_heads=1))
    kept = estimate_step(deep, recipe_of()).activations
    assert estimate_step(deep, recipe_of(recompute=True)).activations < 0.7 * kept
    small = recipe_of(lora=LoraSettings(rank=4, expert_rank=0))
    assert estimate_step(config, small).trained < basic_estimate().trained


def test_a_four_bit_base_packs_its_matrices_and_unpacks_one() -> None:
    config = CONFIG
    recipe = recipe_of()
    plain = basic_estimate()
    packed = with_4bit_base(plain, config, recipe)
    parts = count_parameters(config).parameters_by_part
    eight_bits = parts["shared_mlp"] + parts["attention"] + parts["self_conditioning"] + parts["embedding"]
    saved = plain.weights - packed.weights
    # Four bits and a sixteen-bit scale to each 32; eight bits and a scale to each row.
    assert saved == pytest.approx(parts["experts"] * (2 - 0.5625) + eight_bits * (2 - 1.03), rel=0.03)
    assert packed.activations - plain.activations == 128 * 64 * (4 + 2)  # the largest query projection
    assert packed.trained == plain.trained


GB = 10**9
TRIED = tuple[int | None, bool]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[TRIED]:
    """Estimates without a step: 40 GB of weights, 10 with four bits, and 8 GB for each example kept whole."""
    tried: list[TRIED] = []

    def estimate(config: object, recipe: Recipe) -> MemoryEstimate:
        tried.append((recipe.micro_batch, recipe.recompute))
        examples = recipe.micro_batch or recipe.batch
        each = 2 * GB if recipe.recompute else 8 * GB
        return MemoryEstimate(weights=40 * GB, trained=GB, activations=examples * each)

    def packed(found: MemoryEstimate, config: object, recipe: Recipe) -> MemoryEstimate:
        return replace(found, weights=10 * GB)

    monkeypatch.setattr(memory, "estimate_step", estimate)
    monkeypatch.setattr(memory, "with_4bit_base", packed)
    return tried


BOTH = ("micro_batch=1", "recompute=true")


@pytest.mark.parametrize(
    ("changes", "limit", "expected", "steps"),
    [
        ({}, 50, (("micro_batch=1",), False, 49), [(1, False)]),
        ({}, 44, (BOTH, False, 43), [(1, False), (1, True)]),
        ({}, 42, (BOTH, True, 13), [(1, False), (1, True)]),  # packed from the last estimate
        (
            {},
            24,
            (BOTH, True, 13),
            [(1, True)],
        ),  # the weights alone are too many: not tried without four bits
        ({"micro_batch": 1}, 44, (("recompute=true",), False, 43), [(1, True)]),
        ({"batch": 1}, 44, (("recompute=true",), False, 43), [(None, True)]),
        ({"recompute": True}, 44, (("micro_batch=1",), False, 43), [(1, True)]),
        ({"micro_batch": 1, "recompute": True}, 24, ((), True, 13), []),
        ({"compile": True}, 24, ((*BOTH, "compile=false"), True, 13), [(1, True)]),
        ({"compile": True}, 44, (BOTH, False, 43), [(1, False), (1, True)]),
        ({}, 12, None, [(1, True)]),
        ({}, 10, None, []),  # even four bits are too many
        ({"train": "all"}, 44, (BOTH, False, 43), [(1, False), (1, True)]),
        ({"train": "all"}, 24, None, []),  # trained weights are not packed
    ],
)
def test_the_first_setting_that_fits_is_found_with_few_estimates(
    tried: list[TRIED],
    changes: dict[str, object],
    limit: int,
    expected: tuple[tuple[str, ...], bool, int] | None,
    steps: list[TRIED],
) -> None:
    recipe = recipe_of(**changes)
    first = memory.estimate_step(CONFIG, recipe)
    tried.clear()
    found = cheaper_setting(CONFIG, recipe, first, limit * GB)
    assert tried == steps
    if expected is None:
        assert found is None
        return
    assert isinstance(found, CheaperSetting)
    assert (found.changes, found.has_4bit_base, found.estimate.total // GB) == expected


def test_the_setting_that_is_named_has_the_estimate_of_its_recipe() -> None:
    plain = basic_estimate()
    cheap = estimate_step(CONFIG, recipe_of(micro_batch=1))
    found = cheaper_setting(CONFIG, recipe_of(), plain, cheap.total)
    assert found == CheaperSetting(changes=("micro_batch=1",), has_4bit_base=False, estimate=cheap)
