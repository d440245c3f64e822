"""English sentences on canvases: `PYTHONPATH=. dgemma train recipes/english/learn.py`, after warm.

The rate stays where it is, so `steps=N` prolongs a run; `settle.py` lets it fall.
"""

from dataclasses import replace

from dgemma.training.recipe import DataRecipe, HeldOutRecipe, NoiseRecipe
from recipes.english.warm import LENGTH
from recipes.english.warm import recipe as warm

recipe = replace(
    warm,
    model="runs/english/warm/model",
    out="runs/english/learn",
    # Prompts are of any length, gaps to fill are runs. The tokens of the causal loss are read anyway.
    noise=NoiseRecipe(encoder_weight=1.0, power=0.6, guesses=2, canvases=2, shifted=0.5, runs=0.25),
    optimizer=replace(warm.optimizer, learning_rate=1.2e-2),
    # Of topics that training knows: of others the loss stands still after 250 steps of warm.
    held_out=HeldOutRecipe(
        data=DataRecipe(path="data/english/new_scenes.jsonl", max_length=LENGTH), every=100, examples=256
    ),
    steps=700,
    seed=1,
)
