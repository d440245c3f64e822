"""The same at a falling rate: `PYTHONPATH=. dgemma train recipes/forms/finish.py`, after again."""

from dataclasses import replace

from recipes.forms.again import recipe as again
from recipes.forms.records import Forms

recipe = replace(
    again,
    model="runs/forms/again/model",
    out="runs/forms/finish",
    data=replace(again.data, records=Forms("train", count=1 << 40, seed=8)),
    optimizer=replace(again.optimizer, learning_rate=2e-3, decay="linear", final=0.02),
    steps=850,
    seed=8,
)
