"""The states that the model's own sampler visits: `dgemma train recipes/sudoku/distill.py`.

From the shipped weights. Four of the first 16 states of each path are learned, with the solution as the
target. Most puzzles are hard: the others already settle in a few steps.
"""

from dgemma.sudoku.grid_records import EXAMPLE_LEN
from dgemma.sudoku.presentations import Curriculum, Presentations
from dgemma.sudoku.puzzles import held_out, read_puzzles
from dgemma.training.recipe import (
    DataRecipe,
    HeldOutRecipe,
    NoiseRecipe,
    OptimizerRecipe,
    Recipe,
    RolloutRecipe,
    SavingRecipe,
)

puzzles = Presentations(
    read_puzzles("data/sudoku/train.csv.xz"),
    count=1 << 40,
    seed=3,  # other symmetries and clues than before
    curriculum=Curriculum(fewest=18, most=44, skew=3.0),
)
unseen = Presentations(held_out("medium"), count=1000, curriculum=None)

recipe = Recipe(
    model="bundled:sudoku",
    out="runs/sudoku/distill",
    data=DataRecipe(records=puzzles, max_length=EXAMPLE_LEN, shuffle=False),
    held_out=HeldOutRecipe(
        data=DataRecipe(records=unseen, max_length=EXAMPLE_LEN, shuffle=False), every=200, examples=128
    ),
    train="all",
    freeze=(),
    objective="distill",
    rollout=RolloutRecipe(steps=16, states=4),
    noise=NoiseRecipe(encoder_weight=0.1),  # without, the causal side is lost
    optimizer=OptimizerRecipe(
        kind="muon",
        learning_rate=5e-4,
        betas=(0.9, 0.99),
        weight_decay=1e-2,
        warmup=0.02,
        decay="linear",
        final=0.02,
    ),
    steps=400,
    batch=32,
    precision="auto",
    saving=SavingRecipe(every=20),
)
