"""The last part, at a falling rate: `PYTHONPATH=. dgemma train recipes/forms/settle.py`, after learn."""

from dataclasses import replace

from recipes.forms.learn import recipe as learn
from recipes.forms.records import Forms

recipe = replace(
    learn,
    model="runs/forms/learn/model",
    out="runs/forms/settle",
    data=replace(learn.data, records=Forms("train", count=1 << 40, seed=4)),
    optimizer=replace(learn.optimizer, decay="linear", final=0.02),
    steps=200,
    seed=4,
)
