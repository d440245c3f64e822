"""Words of no list, more days to look up: `PYTHONPATH=. dgemma train recipes/forms/lookup.py`.

From the weights of `close.py`, on canvases of 128 tokens, which have places for three items. One word in
seven is none of the lists: it does not exist, or belongs to another field.

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
    steps=200,
    seed=11,
)
