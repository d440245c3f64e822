"""The learning rate over time, as a function of the step alone."""

from __future__ import annotations

import math

from dgemma.training.recipe import OptimizerRecipe


def learning_rate(step: int, num_steps: int, recipe: OptimizerRecipe) -> float:
    """The rate of step `step`, counted from 0."""
    num_warmup = math.ceil(recipe.warmup * num_steps)
    if step < num_warmup:
        return recipe.learning_rate * (step + 1) / num_warmup
    if recipe.decay == "constant":
        return recipe.learning_rate
    # From the top right after the warm-up to `final` at the last step.
    done = (step - num_warmup) / max(1, num_steps - 1 - num_warmup)
    share = (1 + math.cos(math.pi * done)) / 2 if recipe.decay == "cosine" else 1 - done
    return recipe.learning_rate * (recipe.final + (1 - recipe.final) * share)
