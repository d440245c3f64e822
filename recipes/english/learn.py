"""English sentences on canvases: `PYTHONPATH=. dgemma train recipes/english/learn.py`, after warm.

The rate stays where it is, so `steps=N` prolongs a run; `settle.py` lets it fall.
"""

from dataclasses import replace

from dgemma.training.recipe import NoiseRecipe
from recipes.english.warm import recipe as warm

recipe = replace(
    warm,
    model="runs/english/warm/model",
    out="runs/english/learn",
    # Prompts are of any length, gaps to fill are runs. The tokens of the causal loss are read anyway.
    noise=NoiseRecipe(encoder_weight=1.0, power=0.6, guesses=2, canvases=2, shifted=0.5, runs=0.25),
    steps=480,
    batch=32,  # of few tokens much is learned by many steps
    seed=1,
)
