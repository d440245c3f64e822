"""English sentences, from random weights: `PYTHONPATH=. dgemma train recipes/english/learn.py`.

The rate stays where it is, so `steps=N` prolongs a run; `settle.py` lets it fall.
"""

from dgemma.training.recipe import (
    DataRecipe,
    HeldOutRecipe,
    NoiseRecipe,
    OptimizerRecipe,
    Recipe,
    SavingRecipe,
)

LENGTH = 128

recipe = Recipe(
    model="runs/english/start",
    out="runs/english/learn",
    data=DataRecipe(
        path="data/english/train.jsonl",
        also=("data/english/chats/train.jsonl",),
        max_length=LENGTH,
        packed_length=4 * LENGTH,
    ),
    held_out=HeldOutRecipe(
        data=DataRecipe(path="data/english/held_out.jsonl", max_length=LENGTH), every=250, examples=256
    ),
    train="all",
    freeze=(),
    # A canvas holds most entries whole. Prompts are of any length, gaps to fill are runs.
    noise=NoiseRecipe(encoder_weight=0.5, power=0.7, guesses=2, canvases=2, shifted=0.5, runs=0.25),
    optimizer=OptimizerRecipe(
        kind="muon", learning_rate=3e-3, betas=(0.9, 0.98), weight_decay=1e-2, warmup=0.02, decay="constant"
    ),
    steps=3000,
    batch=64,
    saving=SavingRecipe(every=100),
)
