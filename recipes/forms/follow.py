"""The states that the sampler visits: `PYTHONPATH=. dgemma train recipes/forms/follow.py`, after learn.

Its first step finds the places of all keys and what is easy of the values; noise alone never looks like that.
The rate stays where it is, so `steps=N` prolongs a run.
"""

from dataclasses import replace

from dgemma.training.recipe import RolloutRecipe
from recipes.forms.learn import recipe as learn
from recipes.forms.records import Forms

recipe = replace(
    learn,
    model="runs/forms/learn/model",
    out="runs/forms/follow",
    data=replace(learn.data, records=Forms("train", count=1 << 40, seed=5)),
    objective="distill",
    rollout=RolloutRecipe(steps=4, sampling={"t_min": 0.1, "t_max": 0.3, "max_denoising_steps": 48}),
    optimizer=replace(learn.optimizer, warmup=0.003),
    steps=213,
    seed=5,
)
