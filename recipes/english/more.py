"""More of it, mostly canvases: `PYTHONPATH=. dgemma train recipes/english/more.py`, after settle."""

from dataclasses import replace

from recipes.english.settle import recipe as settle

recipe = replace(
    settle,
    model="runs/english/settle/model",
    out="runs/english/more",
    noise=replace(settle.noise, encoder_weight=0.25),
    steps=1300,
    seed=3,
)
