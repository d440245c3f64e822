"""A recipe that could not train what it says is refused where it is made, by name, value and rule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from dgemma.errors import InputError
from dgemma.model.lora import LoraSettings
from dgemma.training.recipe import (
    DataRecipe,
    HeldOutRecipe,
    NoiseRecipe,
    OptimizerRecipe,
    Recipe,
    SavingRecipe,
)

DATA = DataRecipe(path="chats.jsonl")


def recipe(**changes: Any) -> Recipe:
    return Recipe(**{"model": "my-model", "out": "runs/first", "data": DATA, **changes})


def data(**changes: Any) -> DataRecipe:
    return DataRecipe(**{"path": "chats.jsonl", **changes})


def held_out(**changes: Any) -> HeldOutRecipe:
    return HeldOutRecipe(**{"data": DATA, **changes})


def test_a_recipe_needs_model_out_and_data_only() -> None:
    plain = recipe()
    assert plain.train == "lora"
    assert plain.lora == LoraSettings()
    assert plain.freeze == ("router",)


def test_a_recipe_cannot_be_changed_behind_the_trainers_back() -> None:
    for value in (recipe(), DATA, NoiseRecipe(), OptimizerRecipe(), SavingRecipe(), held_out()):
        name = dataclasses.fields(value)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, "other")


@pytest.mark.parametrize("given", [{}, {"path": "a.jsonl", "records": []}], ids=["neither", "both"])
def test_data_comes_from_one_place(given: dict[str, Any]) -> None:
    with pytest.raises(
        InputError, match=r"^data needs a path, or records from a Python recipe, and not both"
    ):
        DataRecipe(**given)
    with pytest.raises(InputError, match=r"data.also adds to a path, and data has none"):
        DataRecipe(records=[], also=("a.jsonl",))


def test_no_records_are_records() -> None:
    """An empty list is refused by the source, which knows what is missing; here it is only not a path."""
    assert DataRecipe(records=[]).records == []


WHOLE = [
    (data, "max_length", "data.max_length", 2),
    (data, "shuffle_buffer", "data.shuffle_buffer", 1),
    (NoiseRecipe, "canvas_len", "noise.canvas_len", 1),
    (SavingRecipe, "every", "saving.every", 1),
    (SavingRecipe, "keep", "saving.keep", 1),
    (held_out, "every", "held_out.every", 1),
    (held_out, "examples", "held_out.examples", 1),
    (recipe, "steps", "steps", 1),
    (recipe, "batch", "batch", 1),
    (recipe, "micro_batch", "micro_batch", 1),
    (recipe, "seed", "seed", 0),
]


@pytest.mark.parametrize(("make", "field", "name", "low"), WHOLE, ids=[case[2] for case in WHOLE])
def test_whole_numbers_are_whole_and_in_range(
    make: Callable[..., Any], field: str, name: str, low: int
) -> None:
    assert getattr(make(**{field: low}), field) == low
    for bad in (low - 1, -(10**30), 1 << 63, True, 1.0, "5", math.nan):
        with pytest.raises(InputError) as caught:
            make(**{field: bad})
        assert str(caught.value).startswith(f"{name} is {bad!r}; it must be a whole number from {low} to ")


REAL = [
    (NoiseRecipe, "self_conditioning", "noise.self_conditioning", 0, 1),
    (NoiseRecipe, "encoder_weight", "noise.encoder_weight", 0, None),
    (NoiseRecipe, "power", "noise.power", 0.01, None),
    (NoiseRecipe, "shifted", "noise.shifted", 0, 1),
    (NoiseRecipe, "runs", "noise.runs", 0, 1),
    (OptimizerRecipe, "learning_rate", "optimizer.learning_rate", 0, None),
    (OptimizerRecipe, "eps", "optimizer.eps", 1e-30, None),
    (OptimizerRecipe, "weight_decay", "optimizer.weight_decay", 0, None),
    (OptimizerRecipe, "clip", "optimizer.clip", 1e-30, None),
    (OptimizerRecipe, "warmup", "optimizer.warmup", 0, 1),
    (OptimizerRecipe, "final", "optimizer.final", 0, 1),
]


@pytest.mark.parametrize(("make", "field", "name", "low", "high"), REAL, ids=[case[2] for case in REAL])
def test_numbers_are_finite_and_in_range(
    make: Callable[..., Any], field: str, name: str, low: float, high: float | None
) -> None:
    top = 1e30 if high is None else high
    for good in (low, top):
        assert getattr(make(**{field: good}), field) == good
    rule = f"of at least {low:g}" if high is None else f"from {low:g} to {high:g}"
    for bad in (-1e-9, math.nan, math.inf, -math.inf, True, "0.5", *([] if high is None else [1.001])):
        with pytest.raises(InputError) as caught:
            make(**{field: bad})
        assert str(caught.value) == f"{name} is {bad!r}; it must be a number {rule}."


@pytest.mark.parametrize("betas", [(1.0, 0.99), (0.9, 1.0), (-0.1, 0.9), (0.9, math.nan)])
def test_neither_beta_may_keep_everything(betas: tuple[float, float]) -> None:
    with pytest.raises(InputError, match=r"optimizer\.betas is .*from 0 to 0\.999999"):
        OptimizerRecipe(betas=betas)


def test_what_may_be_left_out_may_be_none() -> None:
    assert OptimizerRecipe(clip=None).clip is None
    assert NoiseRecipe(canvas_len=None).canvas_len is None
    assert recipe(micro_batch=None, held_out=None).micro_batch is None


def test_a_batch_is_divided_without_a_rest() -> None:
    assert recipe(batch=8, micro_batch=4).micro_batch == 4
    with pytest.raises(InputError, match=r"micro_batch is 3, batch is 8; it must divide batch"):
        recipe(batch=8, micro_batch=3)


def test_only_parts_of_the_stack_can_be_frozen() -> None:
    every = ("embedding", "norms", "attention", "mlp", "experts", "self_conditioning", "router")
    assert recipe(freeze=every).freeze == every
    assert recipe(freeze=()).freeze == ()
    with pytest.raises(InputError) as caught:
        recipe(freeze=("experts", "ruoter"))
    assert str(caught.value) == (
        "freeze has 'ruoter', which is no part of the stack; did you mean 'router'? "
        f"Parts: {', '.join(every)}."
    )
