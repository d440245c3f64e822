"""English sentences, left to right first: `PYTHONPATH=. dgemma train recipes/english/warm.py`.

A causal token costs a quarter of what a token of a canvas costs, and has a clean context. Both passes share
their weights, so canvases begin where the causal pass ends. The canvas of one token is there because a batch
has one. The rate stays where it is, so `steps=N` prolongs a run; `learn.py` goes on with canvases.
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
    out="runs/english/warm",
    data=DataRecipe(
        path="data/english/train.jsonl",
        also=("data/english/chats/train.jsonl",),
        max_length=LENGTH,
        packed_length=192,
    ),
    held_out=HeldOutRecipe(
        data=DataRecipe(path="data/english/held_out.jsonl", max_length=LENGTH), every=250, examples=256
    ),
    train="all",
    freeze=(),
    noise=NoiseRecipe(encoder_weight=1.0, canvas_len=1, self_conditioning=0),
    optimizer=OptimizerRecipe(
        kind="muon", learning_rate=2e-2, betas=(0.9, 0.98), weight_decay=1e-2, warmup=0.01, decay="constant"
    ),
    steps=1000,
    batch=32,
    saving=SavingRecipe(every=100),
)
