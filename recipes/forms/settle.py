"""The same at a falling rate: `PYTHONPATH=. dgemma train recipes/forms/settle.py`, after follow."""

from dataclasses import replace

from recipes.forms.follow import recipe as follow
from recipes.forms.records import Forms

recipe = replace(
    follow,
    model="runs/forms/follow/model",
    out="runs/forms/settle",
    data=replace(follow.data, records=Forms("train", count=1 << 40, seed=6)),
    optimizer=replace(follow.optimizer, learning_rate=2.5e-3, warmup=0.01, decay="linear", final=0.02),
    steps=520,
    seed=6,
)
