"""More of it in smaller steps, after `learn.py`: `PYTHONPATH=. dgemma train recipes/forms/deepen.py`.

The rate stays where it is, so `steps=N` prolongs a run.
"""

from dataclasses import replace

from recipes.forms.learn import recipe as learn
from recipes.forms.records import Forms

recipe = replace(
    learn,
    model="runs/forms/learn/model",
    out="runs/forms/deepen",
    data=replace(learn.data, records=Forms("train", count=1 << 40, seed=1)),
    steps=555,
    batch=32,
    seed=1,
)
