"""The same at a falling rate: `PYTHONPATH=. dgemma train recipes/forms/rest.py`, after lookup."""

from dataclasses import replace

from recipes.forms.lookup import recipe as lookup
from recipes.forms.records import Forms

recipe = replace(
    lookup,
    model="runs/forms/lookup/model",
    out="runs/forms/rest",
    data=replace(lookup.data, records=Forms("train", count=1 << 40, seed=12)),
    optimizer=replace(lookup.optimizer, decay="linear", final=0.02),
    steps=300,
    seed=12,
)
