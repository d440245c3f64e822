"""More days to look up, orders of three items: `PYTHONPATH=. dgemma train recipes/forms/lookup.py`.

From the shipped weights, on canvases of 128 tokens:

    python -m recipes.forms.make_model --weights src/dgemma/data/models/forms --out runs/forms/start

The rate stays where it is, so `steps=N` prolongs a run; `rest.py` lets it fall.
"""

from dataclasses import replace

from recipes.forms.records import Forms
from recipes.forms.widen import recipe as widen

recipe = replace(
    widen,
    out="runs/forms/lookup",
    data=replace(widen.data, records=Forms("train", count=1 << 40, seed=11)),
    optimizer=replace(widen.optimizer, learning_rate=1.5e-3),
    steps=300,
    seed=11,
)
