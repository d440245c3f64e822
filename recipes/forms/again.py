"""More of it: `PYTHONPATH=. dgemma train recipes/forms/again.py`, after settle; then finish.

The rate stays where it is, so `steps=N` prolongs a run; it was ended after 344 steps. Six steps of each path
are learned, because canvases that take longer than three are those that go wrong. After step 277 the days in
the prompt have their month (`thu1119` in place of `thu19`).
"""

from dataclasses import replace

from dgemma.training.recipe import RolloutRecipe
from recipes.forms.follow import recipe as follow
from recipes.forms.records import Forms

recipe = replace(
    follow,
    model="runs/forms/settle/model",
    out="runs/forms/again",
    data=replace(follow.data, records=Forms("train", count=1 << 40, seed=7)),
    optimizer=replace(follow.optimizer, learning_rate=1.5e-3, warmup=0.01),
    rollout=RolloutRecipe(steps=6),
    steps=3000,
    seed=7,
)
