"""Records out of messages: `PYTHONPATH=. dgemma train recipes/forms/learn.py`, in the project's root.

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
from recipes.forms.records import Forms

LENGTH = 256
PACKED = 512

recipe = Recipe(
    model="runs/forms/start",
    out="runs/forms/learn",
    data=DataRecipe(
        records=Forms("train", count=1 << 40, seed=3), max_length=LENGTH, packed_length=PACKED, shuffle=False
    ),
    held_out=HeldOutRecipe(
        data=DataRecipe(records=Forms("templates", count=256), max_length=LENGTH, shuffle=False),
        every=100,
        examples=128,
    ),
    train="all",
    freeze=(),
    # A canvas starts as noise, and low noise is soon learned: half of all levels are above 0.8.
    noise=NoiseRecipe(encoder_weight=0.3, power=0.35, guesses=2),
    optimizer=OptimizerRecipe(
        kind="muon", learning_rate=3e-3, betas=(0.9, 0.98), weight_decay=1e-2, warmup=0.02, decay="constant"
    ),
    steps=513,
    batch=32,
    saving=SavingRecipe(every=50),
    seed=3,
)
