"""Orders of three items at places of their own: `PYTHONPATH=. dgemma train recipes/forms/three.py`.

From the shipped weights; until now such an order was longer than a canvas, and written without places.

    python -m recipes.forms.make_model --weights src/dgemma/data/models/forms --out runs/forms/start
"""

from dataclasses import replace

from recipes.forms.records import Forms
from recipes.forms.rest import recipe as rest

recipe = replace(
    rest,
    model="runs/forms/start",
    out="runs/forms/three",
    data=replace(rest.data, records=Forms("train", count=1 << 40, seed=13)),
    optimizer=replace(rest.optimizer, learning_rate=1e-3),
    steps=250,
    seed=13,
)
