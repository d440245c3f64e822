"""More words and templates: `PYTHONPATH=. dgemma train recipes/forms/widen.py`, from the weights of `finish`.

367 templates in place of 97, composed messages, things with qualities, errors with any verb; and the days in
the prompt have numbers. The rate stays where it is, so `steps=N` prolongs a run; `close.py` lets it fall.
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
    optimizer=replace(follow.optimizer, learning_rate=2e-3, warmup=0.02),
    rollout=RolloutRecipe(steps=6),
    steps=330,
    seed=9,
)
