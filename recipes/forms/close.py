"""The same at a falling rate: `PYTHONPATH=. dgemma train recipes/forms/close.py`, after widen."""

from dataclasses import replace

from recipes.forms.records import Forms
from recipes.forms.widen import recipe as widen

recipe = replace(
    widen,
    model="runs/forms/widen/model",
    out="runs/forms/close",
    data=replace(widen.data, records=Forms("train", count=1 << 40, seed=10)),
    optimizer=replace(widen.optimizer, learning_rate=2e-3, decay="linear", final=0.02),
    steps=430,
    seed=10,
)
