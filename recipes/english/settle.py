"""The same at a falling rate: `PYTHONPATH=. dgemma train recipes/english/settle.py`, after learn."""

from dataclasses import replace

from recipes.english.learn import recipe as learn

recipe = replace(
    learn,
    model="runs/english/learn/model",
    out="runs/english/settle",
    noise=replace(learn.noise, encoder_weight=0.5),
    optimizer=replace(learn.optimizer, decay="linear", final=0.02),
    steps=1150,
    seed=2,
)
