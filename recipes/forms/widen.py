"""More words: `PYTHONPATH=. dgemma train recipes/forms/widen.py`, from the weights of `finish`.

Things have qualities, errors have verbs, and the days in the prompt have numbers. The rate stays where it is.
"""

from dataclasses import replace

from dgemma.training.recipe import RolloutRecipe
from recipes.forms.follow import recipe as follow
from recipes.forms.records import Forms

recipe = replace(
    follow,
    model="runs/forms/start",
    out="runs/forms/widen",
    data=replace(follow.data, records=Forms("train", count=1 << 40, seed=9)),
    optimizer=replace(follow.optimizer, learning_rate=1.5e-3, warmup=0.02),
    rollout=RolloutRecipe(steps=6),
    steps=250,
    seed=9,
)
