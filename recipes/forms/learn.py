"""From random weights to records: `PYTHONPATH=. dgemma train recipes/forms/learn.py`, in the project's root.

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
        records=Forms("train", count=1 << 40), max_length=LENGTH, packed_length=PACKED, shuffle=False
    ),
    held_out=HeldOutRecipe(
        data=DataRecipe(records=Forms("templates", count=256), max_length=LENGTH, shuffle=False),
        every=100,
        examples=128,
    ),
    train="all",
    freeze=(),
    noise=NoiseRecipe(encoder_weight=0.3, power=0.5, guesses=2, canvases=2),
    optimizer=OptimizerRecipe(
        kind="muon", learning_rate=3e-3, betas=(0.9, 0.98), weight_decay=1e-2, warmup=0.02, decay="constant"
    ),
    steps=250,
    batch=64,
    micro_batch=32,
    saving=SavingRecipe(every=50),
)
