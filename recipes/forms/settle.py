"""The last part, at a falling rate: `PYTHONPATH=. dgemma train recipes/forms/settle.py`, after deepen."""

from dataclasses import replace

from recipes.forms.deepen import recipe as deepen
from recipes.forms.records import Forms

recipe = replace(
    deepen,
    model="runs/forms/deepen/model",
    out="runs/forms/settle",
    data=replace(deepen.data, records=Forms("train", count=1 << 40, seed=2)),
    optimizer=replace(deepen.optimizer, decay="linear", final=0.02),
    noise=replace(deepen.noise, power=0.35),
    steps=125,
    seed=2,
)
